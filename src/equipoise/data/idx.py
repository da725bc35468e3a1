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
from equipoise.data import download
from equipoise.data.dataset import Dataset, whole_split

_UBYTE = 8
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Idx:
    """What differs between the two sets; both name their files alike."""

    name: str
    classes: tuple[str, ...]
    folders: tuple[str, ...]  # below the data directory, in the order they are looked at
    address: str
    md5: dict[str, str]  # of the gzipped files
    first_labels: dict[str, tuple[int, ...]]  # tells the set from its namesake


MNIST = Idx(
    "mnist", tuple("0123456789"), ("MNIST/raw", "mnist", "."),
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    {"train": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4), "test": (7, 2, 1, 0, 4, 1, 4, 9, 5, 9)},
)
FASHION_MNIST = Idx(
    "fashion-mnist",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
     "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ("FashionMNIST/raw", "fashion-mnist", "."),
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    {"train": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5), "test": (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)},
)


def read(idx: Idx, split: str, root: Path) -> Dataset:
    """A split out of the first folder that holds both of its files, plain or with .gz; else downloaded."""
    paths = _find(idx, split, root) or _download(idx, split, root)
    images, labels = read_file(paths[0], dims=3), read_file(paths[1], dims=1)
    checks.labels(labels, len(idx.classes), len(images), name=f"labels in {paths[1]}")
    for other in (MNIST, FASHION_MNIST):
        # Two sets with equal file names: one must not pass for the other in a shared folder.
        if other is not idx and tuple(labels[:10].tolist()) == other.first_labels[split]:
            raise checks.InputError(
                f"`{paths[1]}` must hold the labels of {idx.name}, got those of {other.name}")
    return whole_split(idx.name, split, images.unsqueeze(1), labels, idx.classes)


def _find(idx: Idx, split: str, root: Path) -> list[Path] | None:
    for folder in idx.folders:
        plain = [root / folder / file for file in _FILES[split]]
        found = [next((path for path in (one, one.with_name(one.name + ".gz")) if path.is_file()), None)
                 for one in plain]
        paths = [path for path in found if path is not None]
        if len(paths) == len(plain):
            return paths
    return None


def _download(idx: Idx, split: str, root: Path) -> list[Path]:
    folder = root / idx.folders[0]
    needed = tuple(f"{file}.gz" for file in _FILES[split])
    for file in _FILES[split]:
        download.fetch(download.Remote(f"{idx.address}{file}.gz", idx.md5[file]), folder, needed=needed)
    return [folder / file for file in needed]


def read_file(path: Path, *, dims: int) -> Tensor:
    """One IDX file of bytes with `dims` dimensions: two zeros, type, dimensions, sizes, then the values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        raise checks.InputError(f"`{path}` must be a readable file, got a damaged one ({problem})") from None
    start = 4 + 4 * dims
    checks.require(len(data) >= start and data[:4] == bytes((0, 0, _UBYTE, dims)), str(path),
                   f"be an IDX file of bytes with {dims} dimensions", f"a start of {data[:4].hex()}")
    shape = struct.unpack(f">{dims}I", data[4:start])
    checks.require(len(data) - start == math.prod(shape), str(path),
                   f"hold {math.prod(shape)} values, as its header says", len(data) - start)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())
