"""An image folder: one subfolder a class.

`PATH/<split>/<class>/*` if PATH has a subfolder named after the split or after any of train, test, val and
valid: then every subfolder of PATH is a split, and the classes are those of all splits together, so that they
keep their numbers. Otherwise `PATH/<class>/*` is one split that answers to train and to test. Classes and
files are in sorted order; hidden files are skipped; .png, .jpg and .jpeg are read; anything else is an error,
so that no image is left out silently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import checks
from equipoise.data.dataset import Dataset, whole_split

_SPLITS = ("train", "test", "val", "valid")
_SUFFIXES = (".png", ".jpg", ".jpeg")


def read(path: Path, split: str) -> Dataset:
    """All images of a split; they must be of one size and all grey or all colour."""
    checks.require(path.is_dir(), "data", "name an image folder that exists", str(path))
    parts = _folders(path)
    if any(part.name in (split, *_SPLITS) for part in parts):
        checks.one_of("split", split, [part.name for part in parts])
        classes = sorted({one.name for part in parts for one in _folders(part)})
        root = path / split
    else:
        checks.one_of("split", split, ("train", "test"))
        classes = [part.name for part in parts]
        root = path
    files = [(file, label) for label, one in enumerate(classes) for file in _files(root / one)]
    checks.require(bool(files), "data", "hold images in one subfolder a class", str(root))
    images = _stack([file for file, _ in files])
    labels = torch.tensor([label for _, label in files])
    return whole_split(f"folder:{path}", split, images, labels, tuple(classes))


def _folders(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    # A class may be missing from one split.
    files = sorted(one for one in folder.iterdir() if not one.name.startswith(".")) if folder.is_dir() else []
    for file in files:
        checks.require(file.is_file() and file.suffix.lower() in _SUFFIXES, str(folder),
                       f"hold only images ({', '.join(_SUFFIXES)})", file.name)
    return files


def _stack(files: list[Path]) -> torch.Tensor:
    first = _image(files[0])
    images = np.empty((len(files), *first.shape), np.uint8)
    for number, file in enumerate(files):
        image = _image(file)
        checks.require(image.shape == first.shape, str(file),
                       f"have the shape of {files[0].name}, (C, H, W) = {first.shape}", image.shape)
        images[number] = image
    return torch.from_numpy(images)


def _image(file: Path) -> NDArray[np.uint8]:
    """(C, H, W); a palette or black-and-white image is widened exactly, transparency is refused."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            mode = {"1": "L", "P": "RGB"}.get(opened.mode, opened.mode)
            transparent = "transparency" in opened.info
            values = np.asarray(opened.convert(mode) if mode in ("L", "RGB") else opened)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise checks.InputError(f"`{file}` must be an image, got a damaged file ({problem})") from None
    checks.require(mode in ("L", "RGB") and not transparent, str(file),
                   "be grey or RGB with 8 bits and no transparency", "transparency" if transparent else mode)
    return values.astype(np.uint8).reshape(*values.shape[:2], -1).transpose(2, 0, 1)
