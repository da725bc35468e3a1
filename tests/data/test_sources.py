from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.data import cifar, idx
from equipoise.data.sources import SOURCES, data_directory, load


def test_digits_are_split_evenly() -> None:
    from sklearn.datasets import load_digits

    train, test = load("digits", split="train"), load("digits", split="test")
    assert (len(train), len(test)) == (1442, 355)
    assert torch.bincount(test.labels).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert train.image_shape == (1, 8, 8)
    values, labels = load_digits(return_X_y=True)
    images = np.round(values * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    fifth_zero = np.flatnonzero(labels == 0)[4]
    assert torch.equal(test.images[test.labels == 0][0], torch.from_numpy(images[fifth_zero]))
    together = torch.cat([train.images, test.images]).flatten(1).tolist()
    assert sorted(together) == sorted(images.reshape(-1, 64).tolist())
    assert int(train.images.max()) == 255


def test_a_part_is_exact() -> None:
    whole = load("digits", split="test")
    assert torch.equal(load("digits", split="test", start=300).index, torch.arange(300, 355))
    part = load("digits", split="test", start=7, count=5)
    assert torch.equal(part.images, whole.images[7:12])
    with pytest.raises(InputError, match=r"`count` must be at most 55 from `start` 300 in digits test \(355 images\)"):
        load("digits", split="test", start=300, count=56)
    with pytest.raises(InputError, match="`start` must be at most 354"):
        load("digits", split="test", start=355)
    with pytest.raises(InputError, match="`start` must be a whole number"):
        load("digits", split="test", start=-1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar1", r"`data` must be one of .*, got 'cifar1' \(did you mean 'cifar10.*'\?\)"),
        ("folder", "`data` must be one of .*folder:PATH"),
        ("csv:x", "`data` must be one of"),
        ("npz:", "`data` must name a path, npz:PATH, got 'npz:'"),
        ("folder:/nowhere/at/all", "`data` must name an image folder that exists"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(name, split="test")


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_unknown_splits(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'val'"):
        load(name, split="val", data_dir=tmp_path)


def test_own_data_by_path(tmp_path: Path) -> None:
    images = np.arange(4 * 3 * 5 * 7, dtype=np.uint8).reshape(4, 3, 5, 7)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 1, 1, 0]))
    data = load(f"npz:{tmp_path / 'a.npz'}", split="test", start=1, count=2)
    assert torch.equal(data.images, torch.from_numpy(images[1:3]))


def test_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    assert data_directory(None) == tmp_path / ".cache" / "equipoise"
    monkeypatch.setenv("EQUIPOISE_DATA", "~/elsewhere")
    assert data_directory(None) == tmp_path / "elsewhere"
    assert data_directory(tmp_path / "given") == tmp_path / "given"
    assert data_directory(str(tmp_path / "given")) == tmp_path / "given"


def test_names_are_those_of_the_readers() -> None:
    for known in (cifar.CIFAR10, cifar.CIFAR100, idx.MNIST, idx.FASHION_MNIST):
        assert known.name in SOURCES


@pytest.mark.reference
def test_real_cifar10(real_data: Path) -> None:
    test = load("cifar10", split="test", data_dir=real_data)
    assert tuple(test.images.shape) == (10000, 3, 32, 32)
    assert test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    train = load("cifar10", split="train", data_dir=real_data)
    assert tuple(train.images.shape) == (50000, 3, 32, 32)
    assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    # The well-known channel means, so rows, columns and channels stand where they should.
    means = train.images.double().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=5e-5)


@pytest.mark.reference
def test_real_mnist(real_data: Path) -> None:
    for split, count in (("train", 60000), ("test", 10000)):
        data = load("mnist", split=split, data_dir=real_data)
        assert tuple(data.images.shape) == (count, 1, 28, 28)
        assert tuple(data.labels[:10].tolist()) == idx.MNIST.first_labels[split]
    assert torch.bincount(data.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
