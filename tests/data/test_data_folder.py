from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from equipoise.core.checks import InputError
from equipoise.data import folder

GENERATOR_SEED = 4


def picture(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(GENERATOR_SEED + seed).integers(0, 256, shape, np.uint8)


def save(path: Path, values: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def test_one_split(tmp_path: Path) -> None:
    pictures = {name: picture(number, 5, 7, 3) for number, name in enumerate(("b/1.png", "a/2.PNG", "a/10.png"))}
    for name, values in pictures.items():
        save(tmp_path / name, values)
    (tmp_path / "a" / ".hidden").write_text("skipped")
    (tmp_path / "readme.txt").write_text("beside the classes")
    for split in ("train", "test"):
        data = folder.read(tmp_path, split)
        assert data.classes == ("a", "b")
        assert data.labels.tolist() == [0, 0, 1]
        expected = [pictures[name].transpose(2, 0, 1) for name in ("a/10.png", "a/2.PNG", "b/1.png")]
        assert torch.equal(data.images, torch.from_numpy(np.stack(expected)))
        assert data.image_shape == (3, 5, 7)
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'tset'"):
        folder.read(tmp_path, "tset")


def test_several_splits_number_their_classes_together(tmp_path: Path) -> None:
    save(tmp_path / "train" / "ant" / "0.png", picture(0, 5, 7))
    save(tmp_path / "train" / "cat" / "0.png", picture(1, 5, 7))
    save(tmp_path / "test" / "bee" / "0.png", picture(2, 5, 7))
    save(tmp_path / "test" / "cat" / "0.png", picture(3, 5, 7))
    train, test = folder.read(tmp_path, "train"), folder.read(tmp_path, "test")
    assert train.classes == test.classes == ("ant", "bee", "cat")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 2], [1, 2])
    assert torch.equal(test.images[0, 0], torch.from_numpy(picture(2, 5, 7)))
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'val'"):
        folder.read(tmp_path, "val")


def test_a_missing_split_is_not_a_class(tmp_path: Path) -> None:
    save(tmp_path / "train" / "ant" / "0.png", picture(0, 5, 7))
    with pytest.raises(InputError, match="`split` must be one of train, got 'test'"):
        folder.read(tmp_path, "test")


def test_jpeg_is_what_pillow_decodes(tmp_path: Path) -> None:
    smooth = np.tile(np.arange(0, 160, 10).astype(np.uint8)[:, None, None], (1, 16, 3))
    save(tmp_path / "a" / "0.jpg", smooth)
    data = folder.read(tmp_path, "test")
    difference = data.images[0].int() - torch.from_numpy(smooth.transpose(2, 0, 1).copy()).int()
    assert int(difference.abs().max()) <= 8


def test_palette_and_bilevel_are_widened_exactly(tmp_path: Path) -> None:
    bits = picture(5, 5, 7) > 127
    (tmp_path / "a").mkdir()
    Image.fromarray(bits).save(tmp_path / "a" / "0.png")
    assert torch.equal(folder.read(tmp_path, "test").images[0, 0], torch.from_numpy(bits * np.uint8(255)))
    coloured = Image.fromarray((picture(6, 5, 7) % 2).astype(np.uint8), mode=None).convert("P")
    coloured.putpalette([10, 20, 30, 40, 50, 60])
    (tmp_path / "p" / "a").mkdir(parents=True)
    coloured.save(tmp_path / "p" / "a" / "0.png")
    expected = np.array([[10, 20, 30], [40, 50, 60]], np.uint8)[np.asarray(coloured)].transpose(2, 0, 1)
    assert torch.equal(folder.read(tmp_path / "p", "test").images[0], torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("other", [(7, 5, 3), (5, 7), (5, 8, 3)])
def test_the_first_of_another_shape_is_named(tmp_path: Path, other: tuple[int, ...]) -> None:
    for number in range(4):
        save(tmp_path / "a" / f"{number}.png", picture(number, *(other if number >= 2 else (5, 7, 3))))
    with pytest.raises(InputError, match=f"^`{tmp_path / 'a' / '2.png'}` must have the shape of 0.png"):
        folder.read(tmp_path, "test")


def test_transparency_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a" / "0.png", picture(0, 5, 7, 4))
    with pytest.raises(InputError, match=r"0\.png` must be grey or RGB with 8 bits and no transparency, got 'RGBA'"):
        folder.read(tmp_path, "test")


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a" / "0.png"
    save(path, picture(0, 50, 70, 3))
    raw = path.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"no image"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"^`{path}` must be an image, got a damaged file"):
            folder.read(tmp_path, "test")
    path.write_bytes(raw)
    (tmp_path / "a" / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"must hold only images \(.png, .jpg, .jpeg\), got 'notes.txt'"):
        folder.read(tmp_path, "test")


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`data` must hold images in one subfolder a class"):
        folder.read(tmp_path, "test")
    with pytest.raises(InputError, match="`data` must name an image folder that exists"):
        folder.read(tmp_path / "absent", "test")
