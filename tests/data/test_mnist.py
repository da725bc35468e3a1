from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from equipoise.core.checks import InputError
from equipoise.data import mnist
from equipoise.data.mnist import FASHION_MNIST, MNIST, IdxDataset


def encode(values: NDArray[np.uint8]) -> bytes:
    return (
        bytes((0, 0, 8, values.ndim))
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


def write(
    folder: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8], *, zipped: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("t10k-images-idx3-ubyte", images), ("t10k-labels-idx1-ubyte", labels)):
        raw = encode(values)
        (folder / (name + ".gz" * zipped)).write_bytes(
            gzip.compress(raw, mtime=0) if zipped else raw
        )


IMAGES = np.random.default_rng(2).integers(0, 256, (4, 5, 7), np.uint8)
LABELS = np.array([3, 9, 0, 3], np.uint8)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("source", "folder"),
    [
        (MNIST, "MNIST/raw"),
        (MNIST, "mnist"),
        (MNIST, "."),
        (FASHION_MNIST, "FashionMNIST/raw"),
        (FASHION_MNIST, "fashion-mnist"),
        (FASHION_MNIST, "."),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_folder(tmp_path: Path, source: IdxDataset, folder: str, zipped: bool) -> None:
    write(tmp_path / folder, IMAGES, LABELS, zipped=zipped)
    data = mnist.read(source, "test", tmp_path)
    assert torch.equal(data.images, torch.from_numpy(IMAGES).unsqueeze(1))
    assert data.labels.tolist() == LABELS.tolist()
    assert (data.name, data.num_classes, data.image_shape) == (source.name, 10, (1, 5, 7))


def test_one_data_set_is_not_mistaken_for_the_other(tmp_path: Path) -> None:
    labels = np.array(MNIST.first_labels["test"] + (0, 0), np.uint8)
    write(tmp_path, np.zeros((12, 5, 7), np.uint8), labels)
    assert len(mnist.read(MNIST, "test", tmp_path)) == 12
    with pytest.raises(
        InputError, match="must hold the labels of fashion-mnist, got those of mnist"
    ):
        mnist.read(FASHION_MNIST, "test", tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "must be an IDX file of bytes with 3 dimensions"),
        (encode(IMAGES)[:9], "must be an IDX file of bytes with 3 dimensions"),
        (
            encode(LABELS),
            "must be an IDX file of bytes with 3 dimensions, got 'a start of 00000801'",
        ),
        (b"\x00\x00\x0d\x03" + encode(IMAGES)[4:], "must be an IDX file of bytes"),
        (encode(IMAGES)[:-1], "must hold 140 values, as its header says, got 139"),
        (encode(IMAGES) + b"x", "must hold 140 values, as its header says, got 141"),
    ],
)
def test_the_error_names_a_damaged_file(tmp_path: Path, raw: bytes, message: str) -> None:
    write(tmp_path, IMAGES, LABELS)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=f"^`{path}` {message}"):
        mnist.read(MNIST, "test", tmp_path)


@pytest.mark.parametrize("raw", [b"no gzip", gzip.compress(encode(IMAGES), mtime=0)[:-30], b""])
def test_the_error_names_a_damaged_gzip(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path, IMAGES, LABELS, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=f"^`{path}` must be"):
        mnist.read(MNIST, "test", tmp_path)


@pytest.mark.parametrize("labels", [[3, 9, 0, 10], [3, 9, 0]])
def test_labels_must_match_the_images_and_classes(tmp_path: Path, labels: list[int]) -> None:
    write(tmp_path, IMAGES, np.array(labels, np.uint8))
    with pytest.raises(
        InputError, match=f"^`labels in {tmp_path / 't10k-labels-idx1-ubyte'}` must "
    ):
        mnist.read(MNIST, "test", tmp_path)
