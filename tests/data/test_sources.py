from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.data import cifar, mnist
from equipoise.data.sources import DATASETS, DataSettings, data_directory, load_data


def test_digits_are_split_evenly() -> None:
    from sklearn.datasets import load_digits

    train, test = load_data("digits", split="train"), load_data("digits", split="test")
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
    whole = load_data("digits", split="test")
    assert torch.equal(load_data("digits", split="test", start=300).index, torch.arange(300, 355))
    part = load_data("digits", split="test", start=7, count=5)
    assert torch.equal(part.images, whole.images[7:12])
    with pytest.raises(
        InputError,
        match=r"`count` must be at most 55 from `start` 300 in digits test \(355 images\)",
    ):
        load_data("digits", split="test", start=300, count=56)
    with pytest.raises(InputError, match="`start` must be at most 354"):
        load_data("digits", split="test", start=355)
    with pytest.raises(InputError, match="`start` must be a whole number"):
        load_data("digits", split="test", start=-1)


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
        load_data(name, split="test")


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_unknown_splits(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'val'"):
        load_data(name, split="val", data_dir=tmp_path)


def test_own_data_by_path(tmp_path: Path) -> None:
    images = np.arange(4 * 3 * 5 * 7, dtype=np.uint8).reshape(4, 3, 5, 7)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 1, 1, 0]))
    data = load_data(f"npz:{tmp_path / 'a.npz'}", split="test", start=1, count=2, sample="first")
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
    for known in (cifar.CIFAR10, cifar.CIFAR100, mnist.MNIST, mnist.FASHION_MNIST):
        assert known.name in DATASETS


def test_every_nth_image_of_a_part() -> None:
    assert load_data("digits", start=7, count=5, every=2).index.tolist() == [7, 9, 11]
    with pytest.raises(InputError, match="`every` must be a whole number of at least 1, got 0"):
        load_data("digits", every=0)


def test_settings_load_their_images() -> None:
    settings = DataSettings(data="digits", start=3, count=4, every=3)
    assert settings.load().index.tolist() == [3, 6]
    with pytest.raises(InputError, match="`count` must be a whole number of at least 1"):
        DataSettings(count=0)


def test_an_installed_package_adds_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "toy-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[equipoise.datasets]\ntoy = toy_data:read\n")
    (tmp_path / "toy_data.py").write_text(
        "import torch\nfrom equipoise.data.dataset import whole_split\n\n\ndef read(split, root):\n"
        "    return whole_split('toy', split, torch.zeros(3, 1, 2, 2), torch.arange(3), ('a', 'b', 'c'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    datasets = type(DATASETS)(
        DATASETS.group, DATASETS.noun, DATASETS.builtin
    )  # entry points are read once
    assert "toy" in datasets and len(datasets["toy"]("test", tmp_path)) == 3


@pytest.mark.reference
def test_real_cifar10(real_data: Path) -> None:
    test = load_data("cifar10", split="test", data_dir=real_data)
    assert tuple(test.images.shape) == (10000, 3, 32, 32)
    assert test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    train = load_data("cifar10", split="train", data_dir=real_data)
    assert tuple(train.images.shape) == (50000, 3, 32, 32)
    assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    # The well-known channel means, so rows, columns and channels are in the right order.
    means = train.images.double().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(
        means, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=5e-5
    )


@pytest.mark.reference
def test_real_mnist(real_data: Path) -> None:
    for split, count in (("train", 60000), ("test", 10000)):
        data = load_data("mnist", split=split, data_dir=real_data)
        assert tuple(data.images.shape) == (count, 1, 28, 28)
        assert tuple(data.labels[:10].tolist()) == mnist.MNIST.first_labels[split]
    assert torch.bincount(data.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
