from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from equipoise.core.checks import InputError
from equipoise.data import user_files

SEED = 4


def picture(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(SEED + seed).integers(0, 256, shape, np.uint8)


def save(path: Path, values: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def test_folder_with_one_split(tmp_path: Path) -> None:
    pictures = {
        name: picture(number, 5, 7, 3)
        for number, name in enumerate(("b/1.png", "a/2.PNG", "a/10.png"))
    }
    for name, values in pictures.items():
        save(tmp_path / name, values)
    (tmp_path / "a" / ".hidden").write_text("skipped")
    (tmp_path / "readme.txt").write_text("beside the classes")
    for split in ("train", "test"):
        data = user_files.read_folder(tmp_path, split)
        assert data.classes == ("a", "b")
        assert data.labels.tolist() == [0, 0, 1]
        expected = [
            pictures[name].transpose(2, 0, 1) for name in ("a/10.png", "a/2.PNG", "b/1.png")
        ]
        assert torch.equal(data.images, torch.from_numpy(np.stack(expected)))
        assert data.image_shape == (3, 5, 7)
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'tset'"):
        user_files.read_folder(tmp_path, "tset")


def test_splits_of_a_folder_share_their_classes(tmp_path: Path) -> None:
    save(tmp_path / "train" / "ant" / "0.png", picture(0, 5, 7))
    save(tmp_path / "train" / "cat" / "0.png", picture(1, 5, 7))
    save(tmp_path / "test" / "bee" / "0.png", picture(2, 5, 7))
    save(tmp_path / "test" / "cat" / "0.png", picture(3, 5, 7))
    train, test = (
        user_files.read_folder(tmp_path, "train"),
        user_files.read_folder(tmp_path, "test"),
    )
    assert train.classes == test.classes == ("ant", "bee", "cat")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 2], [1, 2])
    assert torch.equal(test.images[0, 0], torch.from_numpy(picture(2, 5, 7)))
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'val'"):
        user_files.read_folder(tmp_path, "val")


def test_a_missing_split_is_not_a_class(tmp_path: Path) -> None:
    save(tmp_path / "train" / "ant" / "0.png", picture(0, 5, 7))
    with pytest.raises(InputError, match="`split` must be one of train, got 'test'"):
        user_files.read_folder(tmp_path, "test")


def test_jpeg_is_what_pillow_decodes(tmp_path: Path) -> None:
    smooth = np.tile(np.arange(0, 160, 10).astype(np.uint8)[:, None, None], (1, 16, 3))
    save(tmp_path / "a" / "0.jpg", smooth)
    data = user_files.read_folder(tmp_path, "test")
    difference = data.images[0].int() - torch.from_numpy(smooth.transpose(2, 0, 1).copy()).int()
    assert int(difference.abs().max()) <= 8


def test_palette_and_bilevel_images_are_converted_exactly(tmp_path: Path) -> None:
    bits = picture(5, 5, 7) > 127
    (tmp_path / "a").mkdir()
    Image.fromarray(bits).save(tmp_path / "a" / "0.png")
    assert torch.equal(
        user_files.read_folder(tmp_path, "test").images[0, 0],
        torch.from_numpy(bits * np.uint8(255)),
    )
    coloured = Image.fromarray((picture(6, 5, 7) % 2).astype(np.uint8), mode=None).convert("P")
    coloured.putpalette([10, 20, 30, 40, 50, 60])
    (tmp_path / "p" / "a").mkdir(parents=True)
    coloured.save(tmp_path / "p" / "a" / "0.png")
    expected = np.array([[10, 20, 30], [40, 50, 60]], np.uint8)[np.asarray(coloured)].transpose(
        2, 0, 1
    )
    assert torch.equal(
        user_files.read_folder(tmp_path / "p", "test").images[0], torch.from_numpy(expected.copy())
    )


@pytest.mark.parametrize("other", [(7, 5, 3), (5, 7), (5, 8, 3)])
def test_the_error_names_the_first_image_of_another_shape(
    tmp_path: Path, other: tuple[int, ...]
) -> None:
    for number in range(4):
        save(
            tmp_path / "a" / f"{number}.png",
            picture(number, *(other if number >= 2 else (5, 7, 3))),
        )
    with pytest.raises(
        InputError, match=f"^`{tmp_path / 'a' / '2.png'}` must have the shape of 0.png"
    ):
        user_files.read_folder(tmp_path, "test")


def test_transparency_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a" / "0.png", picture(0, 5, 7, 4))
    with pytest.raises(
        InputError, match=r"0\.png` must be grey or RGB with 8 bits and no transparency, got 'RGBA'"
    ):
        user_files.read_folder(tmp_path, "test")


def test_the_error_names_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "0.png"
    save(path, picture(0, 50, 70, 3))
    raw = path.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"no image"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"^`{path}` must be an image, got a damaged file"):
            user_files.read_folder(tmp_path, "test")
    path.write_bytes(raw)
    (tmp_path / "a" / "notes.txt").write_text("")
    with pytest.raises(
        InputError, match=r"must hold only images \(.png, .jpg, .jpeg\), got 'notes.txt'"
    ):
        user_files.read_folder(tmp_path, "test")


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`data` must hold images in one subfolder per class"):
        user_files.read_folder(tmp_path, "test")
    with pytest.raises(InputError, match="`data` must name an image folder that exists"):
        user_files.read_folder(tmp_path / "absent", "test")


IMAGES = np.random.default_rng(1).integers(0, 256, (4, 3, 5, 7), np.uint8)
LABELS = np.array([2, 0, 1, 2])


def save_npz(path: Path, **content: Any) -> Path:
    np.savez(path, **content)
    return path


def test_npz_with_one_split(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "x.npz", images=IMAGES, labels=LABELS.astype(np.uint8))
    for split in ("train", "test"):
        data = user_files.read_npz(path, split)
        assert torch.equal(data.images, torch.from_numpy(IMAGES))
        assert data.labels.tolist() == LABELS.tolist()
        assert (data.classes, data.split, data.name) == (("0", "1", "2"), split, f"npz:{path}")


def test_splits_of_an_npz_share_their_classes(tmp_path: Path) -> None:
    path = save_npz(
        tmp_path / "x.npz",
        train_images=IMAGES,
        train_labels=LABELS + 3,
        val_images=IMAGES[:2],
        val_labels=LABELS[:2],
    )
    assert (
        user_files.read_npz(path, "val").num_classes
        == user_files.read_npz(path, "train").num_classes
        == 6
    )
    assert len(user_files.read_npz(path, "val")) == 2
    with pytest.raises(InputError, match="`split` must be one of train, val, got 'test'"):
        user_files.read_npz(path, "test")


def test_class_names_of_an_npz(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "x.npz", images=IMAGES, labels=LABELS, classes=["a", "b", "c", "d"])
    assert user_files.read_npz(path, "test").classes == ("a", "b", "c", "d")
    path = save_npz(tmp_path / "y.npz", images=IMAGES, labels=LABELS, classes=["a", "b"])
    with pytest.raises(InputError, match=f"^`labels in {path}` must lie in 0..1"):
        user_files.read_npz(path, "test")
    with pytest.raises(InputError, match="must be a list of text"):
        user_files.read_npz(
            save_npz(tmp_path / "z.npz", images=IMAGES, labels=LABELS, classes=[1, 2]), "test"
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"images": IMAGES / 255, "labels": LABELS}, "`images in .*` must be uint8, got 'float64'"),
        (
            {"images": np.zeros((4, 32, 32, 3), np.uint8), "labels": LABELS},
            r"must have shape \(N, C, H, W\)",
        ),
        ({"images": IMAGES[:, 0], "labels": LABELS}, r"must have shape \(N, C, H, W\)"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, r"must have shape \(N, C, H, W\)"),
        (
            {"images": IMAGES, "labels": LABELS / 2},
            "`labels in .*` must be integers, got 'float64'",
        ),
        ({"images": IMAGES, "labels": LABELS[:3]}, "must be as many as the images, 4, got 3"),
        ({"images": IMAGES, "labels": LABELS[:, None]}, "must be whole numbers of shape"),
        ({"images": IMAGES, "labels": LABELS - 1}, "must lie in 0..1, got 'values from -1 to 1'"),
        ({"images": IMAGES}, "must hold `labels`, got 'images'"),
        ({"pictures": IMAGES}, "must hold `images`, got 'pictures'"),
        ({"test_images": IMAGES, "labels": LABELS}, "must hold `test_labels`"),
        ({"images": IMAGES, "labels": np.array([{}] * 4)}, "must be an .npz file of plain arrays"),
    ],
)
def test_invalid_arrays_are_an_error(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = save_npz(tmp_path / "x.npz", **content)
    with pytest.raises(InputError, match=message) as caught:
        user_files.read_npz(path, "test")
    assert str(path) in str(caught.value)


def test_the_error_names_a_damaged_npz(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "x.npz", images=IMAGES, labels=LABELS)
    raw = path.read_bytes()
    single = tmp_path / "y.npy"
    np.save(single, IMAGES)
    altered = raw.replace(IMAGES.tobytes()[:9], b"!" * 9)
    for damaged in (raw[: len(raw) // 2], b"", b"text", single.read_bytes(), altered):
        path.write_bytes(damaged)
        with pytest.raises(
            InputError, match=f"^`{path}` must be an .npz file of plain arrays, got "
        ):
            user_files.read_npz(path, "test")
    with pytest.raises(InputError, match=r"`data` must name an \.npz file that exists"):
        user_files.read_npz(tmp_path / "absent.npz", "test")
