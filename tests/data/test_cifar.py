from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from equipoise.core.checks import InputError
from equipoise.data import cifar
from equipoise.data.cifar import CIFAR10, CIFAR100, CLASSES_100, Cifar

SETS = [CIFAR10, CIFAR100]
Content = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def made(which: Cifar, split: str, each: int = 4) -> Content:
    generator = np.random.default_rng(5)
    return {
        file: (generator.integers(0, 256, (each, 3072), np.uint8),
               generator.integers(0, len(which.classes), each, np.uint8))
        for file in which.files[split]
    }


def write_pickles(which: Cifar, folder: Path, content: Content) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (pixels, labels) in content.items():
        entry = {b"data": pixels, which.label_key: labels.tolist(), b"coarse_labels": [0] * len(labels)}
        (folder / file).write_bytes(pickle.dumps(entry, 2))


def write_binaries(which: Cifar, folder: Path, content: Content) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (pixels, labels) in content.items():
        coarse = [np.full((len(labels), 1), 19, np.uint8)] * (which.label_bytes - 1)
        np.concatenate([*coarse, labels[:, None], pixels], axis=1).tofile(folder / f"{file}.bin")


def check(which: Cifar, split: str, root: Path, content: Content) -> None:
    data = cifar.read(which, split, root)
    images = np.concatenate([pixels for pixels, _ in content.values()]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in content.values()])
    assert torch.equal(data.images, torch.from_numpy(images))
    assert data.labels.tolist() == labels.tolist()
    assert (data.name, data.split, data.classes) == (which.name, split, which.classes)


@pytest.mark.parametrize("which", SETS, ids=lambda which: which.name)
@pytest.mark.parametrize("split", ["train", "test"])
def test_both_layouts(tmp_path: Path, which: Cifar, split: str) -> None:
    content = made(which, split)
    write_pickles(which, tmp_path / "a" / which.pickled_in, content)
    write_binaries(which, tmp_path / "b" / which.binary_in, content)
    write_pickles(which, tmp_path / "c", content)
    write_binaries(which, tmp_path / "d", content)
    for folder in "abcd":
        check(which, split, tmp_path / folder, content)


def test_an_incomplete_layout_gives_way_to_a_complete_one(tmp_path: Path) -> None:
    content = made(CIFAR10, "train")
    write_pickles(CIFAR10, tmp_path / CIFAR10.pickled_in, dict(list(content.items())[:4]))
    write_binaries(CIFAR10, tmp_path / CIFAR10.binary_in, content)
    check(CIFAR10, "train", tmp_path, content)


def test_a_cut_binary_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    for size in (0, 3072, 2 * 3073 - 1):
        path.write_bytes(bytes(size))
        with pytest.raises(InputError, match=rf"^`{path}` must hold whole records of 3073 bytes, got '{size} bytes'$"):
            cifar.read(CIFAR10, "test", tmp_path)


def test_a_label_outside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes((10,)) + bytes(3072))
    with pytest.raises(InputError, match=rf"^`labels in {path}` must lie in 0..9, got 'values from 10 to 10'$"):
        cifar.read(CIFAR10, "test", tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({b"labels": [0]}, r"must hold `data` of shape \(N, 3072\), got NoneType"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [0]}, r"must hold `data` of shape \(N, 3072\)"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "must hold `labels`, a list of whole numbers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}, "must hold `labels`, a list of whole numbers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1.5]}, "must hold `labels`, a list of whole numbers"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "must be as many as the images, 2, got 1"),
    ],
)
def test_a_pickle_of_something_else_is_named(tmp_path: Path, entry: dict[bytes, object], message: str) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(entry, 2))
    with pytest.raises(InputError, match=message) as caught:
        cifar.read(CIFAR10, "test", tmp_path)
    assert str(path) in str(caught.value)


def test_class_names() -> None:
    assert len(set(CLASSES_100)) == 100
    assert list(CLASSES_100) == sorted(CLASSES_100)
    assert len(set(CIFAR10.classes)) == 10
