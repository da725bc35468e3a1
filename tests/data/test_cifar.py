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


def make_content(source: Cifar, split: str, count: int = 4) -> Content:
    generator = np.random.default_rng(5)
    return {
        file: (
            generator.integers(0, 256, (count, 3072), np.uint8),
            generator.integers(0, len(source.classes), count, np.uint8),
        )
        for file in source.files[split]
    }


def write_pickles(source: Cifar, folder: Path, content: Content) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (pixels, labels) in content.items():
        entry = {
            b"data": pixels,
            source.label_key: labels.tolist(),
            b"coarse_labels": [0] * len(labels),
        }
        (folder / file).write_bytes(pickle.dumps(entry, 2))


def write_binaries(source: Cifar, folder: Path, content: Content) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (pixels, labels) in content.items():
        coarse = [np.full((len(labels), 1), 19, np.uint8)] * (source.label_bytes - 1)
        np.concatenate([*coarse, labels[:, None], pixels], axis=1).tofile(folder / f"{file}.bin")


def check(source: Cifar, split: str, root: Path, content: Content) -> None:
    data = cifar.read(source, split, root)
    images = np.concatenate([pixels for pixels, _ in content.values()]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in content.values()])
    assert torch.equal(data.images, torch.from_numpy(images))
    assert data.labels.tolist() == labels.tolist()
    assert (data.name, data.split, data.classes) == (source.name, split, source.classes)


@pytest.mark.parametrize("source", SETS, ids=lambda source: source.name)
@pytest.mark.parametrize("split", ["train", "test"])
def test_both_layouts(tmp_path: Path, source: Cifar, split: str) -> None:
    content = make_content(source, split)
    write_pickles(source, tmp_path / "a" / source.python_folder, content)
    write_binaries(source, tmp_path / "b" / source.binary_folder, content)
    write_pickles(source, tmp_path / "c", content)
    write_binaries(source, tmp_path / "d", content)
    for folder in "abcd":
        check(source, split, tmp_path / folder, content)


def test_a_complete_layout_is_preferred_to_an_incomplete_one(tmp_path: Path) -> None:
    content = make_content(CIFAR10, "train")
    write_pickles(CIFAR10, tmp_path / CIFAR10.python_folder, dict(list(content.items())[:4]))
    write_binaries(CIFAR10, tmp_path / CIFAR10.binary_folder, content)
    check(CIFAR10, "train", tmp_path, content)


def test_the_error_names_a_truncated_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    for size in (0, 3072, 2 * 3073 - 1):
        path.write_bytes(bytes(size))
        with pytest.raises(
            InputError,
            match=rf"^`{path}` must hold whole records of 3073 bytes, got '{size} bytes'$",
        ):
            cifar.read(CIFAR10, "test", tmp_path)


def test_the_error_names_the_file_of_an_invalid_label(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes((10,)) + bytes(3072))
    with pytest.raises(
        InputError, match=rf"^`labels in {path}` must lie in 0..9, got 'values from 10 to 10'$"
    ):
        cifar.read(CIFAR10, "test", tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({b"labels": [0]}, r"must hold `data` of shape \(N, 3072\), got NoneType"),
        (
            {b"data": np.zeros((1, 3071), np.uint8), b"labels": [0]},
            r"must hold `data` of shape \(N, 3072\)",
        ),
        (
            {b"data": np.zeros((1, 3072)), b"labels": [0]},
            "arrays of uint8, got an array of 'f8'",
        ),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "must hold `labels`, a list of integers"),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]},
            "must hold `labels`, a list of integers",
        ),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1.5]},
            "must hold `labels`, a list of integers",
        ),
        (
            {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
            "must be as many as the images, 2, got 1",
        ),
    ],
)
def test_the_error_names_a_pickle_of_something_else(
    tmp_path: Path, entry: dict[bytes, object], message: str
) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(entry, 2))
    with pytest.raises(InputError, match=message) as caught:
        cifar.read(CIFAR10, "test", tmp_path)
    assert str(path) in str(caught.value)


def test_the_folder_that_torchvision_unpacks_is_read(tmp_path: Path) -> None:
    """The batches beside their names, `batches.meta`."""
    content = make_content(CIFAR10, "train")
    folder = tmp_path / "cifar-10-batches-py"
    write_pickles(CIFAR10, folder, content)
    names = {"label_names": list(CIFAR10.classes), "num_cases_per_batch": 4, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, 2))
    check(CIFAR10, "train", tmp_path, content)
    assert list(cifar.load_pickle(folder / "batches.meta").values()) == list(names.values())


def test_class_names() -> None:
    assert len(set(CLASSES_100)) == 100
    assert list(CLASSES_100) == sorted(CLASSES_100)
    assert len(set(CIFAR10.classes)) == 10
