"""MNIST [LeCun1998] and Fashion-MNIST [Xiao2017]: IDX files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.data import download, limits
from equipoise.data.checksums import SHA256
from equipoise.data.dataset import Dataset, whole_split

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_MAX_VALUES = 60_000 * 28 * 28


@dataclass(frozen=True)
class IdxDataset:
    """One of the two data sets; their files have equal names."""

    name: str
    classes: tuple[str, ...]
    folders: tuple[str, ...]  # below the data directory, in order of preference
    address: str
    first_labels: dict[str, tuple[int, ...]]  # distinguish the two data sets
    checksums: dict[str, str]  # SHA-256 by file name


MNIST = IdxDataset(
    "mnist",
    tuple("0123456789"),
    ("MNIST/raw", "mnist", "."),
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {"train": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4), "test": (7, 2, 1, 0, 4, 1, 4, 9, 5, 9)},
    SHA256["mnist"],
)
FASHION_MNIST = IdxDataset(
    "fashion-mnist",
    (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    ("FashionMNIST/raw", "fashion-mnist", "."),
    "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
    {"train": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5), "test": (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)},
    SHA256["fashion-mnist"],
)


def read(source: IdxDataset, split: str, root: Path) -> Dataset:
    """Read a split from the first folder that has both of its files, plain or .gz; download them if
    there is none."""
    paths = _find(source, split, root) or _download(source, split, root)
    images, labels = read_file(paths[0], dims=3), read_file(paths[1], dims=1)
    checks.labels(labels, len(source.classes), len(images), name=f"labels in {paths[1]}")
    for other in (MNIST, FASHION_MNIST):
        # Equal file names: one data set must not be mistaken for the other in a shared folder.
        if other is not source and tuple(labels[:10].tolist()) == other.first_labels[split]:
            raise checks.InputError(
                f"`{paths[1]}` must hold the labels of {source.name}, got those of {other.name}"
            )
    return whole_split(source.name, split, images.unsqueeze(1), labels, source.classes)


def _find(source: IdxDataset, split: str, root: Path) -> list[Path] | None:
    for folder in source.folders:
        candidates = [
            [root / folder / f"{file}{suffix}" for suffix in ("", ".gz")] for file in FILES[split]
        ]
        paths = [next(filter(Path.is_file, pair), None) for pair in candidates]
        if None not in paths:
            return [path for path in paths if path]
    return None


def _download(source: IdxDataset, split: str, root: Path) -> list[Path]:
    needed = [f"{file}.gz" for file in FILES[split]]
    return [
        download.fetch(
            download.Remote(source.address + file, source.checksums[file]),
            root / source.folders[0],
            needed=needed,
        )
        for file in needed
    ]


def read_file(path: Path, *, dims: int) -> Tensor:
    """One IDX file of bytes with `dims` dimensions: two zeros, the type 8, dimensions, sizes, then
    the values."""
    start = 4 + 4 * dims
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(start)
            checks.require(
                len(header) == start and header[:4] == bytes((0, 0, 8, dims)),
                str(path),
                f"be an IDX file of bytes with {dims} dimensions",
                f"a start of {header[:4].hex()}",
            )
            shape = struct.unpack(f">{dims}I", header[4:])
            data = limits.read_exactly(file, path, math.prod(shape), _MAX_VALUES)
    except (OSError, EOFError, zlib.error) as problem:
        raise checks.InputError(
            f"`{path}` must be a readable file, got a damaged one ({problem})"
        ) from None
    return torch.from_numpy(np.frombuffer(data, np.uint8).reshape(shape).copy())
