from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.data import arrays

IMAGES = np.random.default_rng(1).integers(0, 256, (4, 3, 5, 7), np.uint8)
LABELS = np.array([2, 0, 1, 2])


def save(path: Path, **content: Any) -> Path:
    np.savez(path, **content)
    return path


def test_one_split(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", images=IMAGES, labels=LABELS.astype(np.uint8))
    for split in ("train", "test"):
        data = arrays.read(path, split)
        assert torch.equal(data.images, torch.from_numpy(IMAGES))
        assert data.labels.tolist() == LABELS.tolist()
        assert (data.classes, data.split, data.name) == (("0", "1", "2"), split, f"npz:{path}")


def test_several_splits_share_their_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", train_images=IMAGES, train_labels=LABELS + 3, val_images=IMAGES[:2],
                val_labels=LABELS[:2])
    assert arrays.read(path, "val").num_classes == arrays.read(path, "train").num_classes == 6
    assert len(arrays.read(path, "val")) == 2
    with pytest.raises(InputError, match="`split` must be one of train, val, got 'test'"):
        arrays.read(path, "test")


def test_named_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", images=IMAGES, labels=LABELS, classes=["a", "b", "c", "d"])
    assert arrays.read(path, "test").classes == ("a", "b", "c", "d")
    path = save(tmp_path / "y.npz", images=IMAGES, labels=LABELS, classes=["a", "b"])
    with pytest.raises(InputError, match=f"^`labels in {path}` must lie in 0..1"):
        arrays.read(path, "test")
    with pytest.raises(InputError, match="must be a list of text"):
        arrays.read(save(tmp_path / "z.npz", images=IMAGES, labels=LABELS, classes=[1, 2]), "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"images": IMAGES / 255, "labels": LABELS}, "`images in .*` must be uint8, got 'float64'"),
        ({"images": np.zeros((4, 32, 32, 3), np.uint8), "labels": LABELS}, r"must have shape \(N, C, H, W\)"),
        ({"images": IMAGES[:, 0], "labels": LABELS}, r"must have shape \(N, C, H, W\)"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, r"must have shape \(N, C, H, W\)"),
        ({"images": IMAGES, "labels": LABELS / 2}, "`labels in .*` must be whole numbers, got 'float64'"),
        ({"images": IMAGES, "labels": LABELS[:3]}, "must be as many as the images, 4, got 3"),
        ({"images": IMAGES, "labels": LABELS[:, None]}, "must be whole numbers of shape"),
        ({"images": IMAGES, "labels": LABELS - 1}, "must lie in 0..1, got 'values from -1 to 1'"),
        ({"images": IMAGES}, "must hold `labels`, got 'images'"),
        ({"pictures": IMAGES}, "must hold `images`, got 'pictures'"),
        ({"test_images": IMAGES, "labels": LABELS}, "must hold `test_labels`"),
        ({"images": IMAGES, "labels": np.array([{}] * 4)}, "must be an .npz file of plain arrays"),
    ],
)
def test_nothing_is_guessed(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "x.npz", **content)
    with pytest.raises(InputError, match=message) as caught:
        arrays.read(path, "test")
    assert str(path) in str(caught.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", images=IMAGES, labels=LABELS)
    raw = path.read_bytes()
    single = tmp_path / "y.npy"
    np.save(single, IMAGES)
    altered = raw.replace(IMAGES.tobytes()[:9], b"!" * 9)
    for damaged in (raw[: len(raw) // 2], b"", b"text", single.read_bytes(), altered):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"^`{path}` must be an .npz file of plain arrays, got "):
            arrays.read(path, "test")
    with pytest.raises(InputError, match=r"`data` must name an \.npz file that exists"):
        arrays.read(tmp_path / "absent.npz", "test")
