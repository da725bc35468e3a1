"""The user's own images: `folder:PATH`, one subfolder per class, and `npz:PATH`, a numpy file.

`folder:PATH` is `PATH/<split>/<class>/*` if PATH has a subfolder named after the split or after any
of train, test, val and valid: then every subfolder of PATH is a split, and the classes of all
splits are numbered together. Otherwise `PATH/<class>/*` is one split, which serves as train and as
test. Classes and files are in sorted order; hidden files are skipped; .png, .jpg and .jpeg are
read; any other file is an error, so that no image is left out silently.

`npz:PATH` holds `images` (N, C, H, W) uint8, `labels` (N,) integers and optionally `classes` (text,
one per class). Several splits are `<split>_images` and `<split>_labels`; plain `images` and
`labels` serve as train and as test. Floats and (N, H, W, C) are errors. Without `classes` they are
numbered up to the greatest label of all splits in the file.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import checks
from equipoise.data import limits
from equipoise.data.conversion import picture_values
from equipoise.data.dataset import Dataset, whole_split

_SPLITS = ("train", "test", "val", "valid")
_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_folder(path: Path, split: str) -> Dataset:
    """All images of a split; they must be of one size and all grey or all RGB."""
    checks.require(path.is_dir(), "data", "name an image folder that exists", str(path))
    folders = _subfolders(path)
    if any(folder.name in (split, *_SPLITS) for folder in folders):
        checks.one_of("split", split, [folder.name for folder in folders])
        classes = sorted({sub.name for folder in folders for sub in _subfolders(folder)})
        root = path / split
    else:
        checks.one_of("split", split, ("train", "test"))
        classes = [folder.name for folder in folders]
        root = path
    files = [
        (file, label) for label, name in enumerate(classes) for file in _image_files(root / name)
    ]
    checks.require(bool(files), "data", "hold images in one subfolder per class", str(root))
    images = _read_images([file for file, _ in files])
    labels = torch.tensor([label for _, label in files])
    return whole_split(f"folder:{path}", split, images, labels, tuple(classes))


def _subfolders(path: Path) -> list[Path]:
    return sorted(sub for sub in path.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    # A class may be missing from one split.
    files = (
        sorted(file for file in folder.iterdir() if not file.name.startswith("."))
        if folder.is_dir()
        else []
    )
    for file in files:
        checks.require(
            file.is_file() and file.suffix.lower() in _SUFFIXES,
            str(folder),
            f"hold only images ({', '.join(_SUFFIXES)})",
            file.name,
        )
    return files


def _read_images(files: list[Path]) -> torch.Tensor:
    first = _read_image(files[0])
    try:
        images = np.empty((len(files), *first.shape), np.uint8)
    except MemoryError:
        raise checks.InputError(
            f"`data` must fit into memory, got {len(files)} images of {first.shape}"
        ) from None
    for number, file in enumerate(files):
        image = _read_image(file)
        checks.require(
            image.shape == first.shape,
            str(file),
            f"have the shape of {files[0].name}, (C, H, W) = {first.shape}",
            image.shape,
        )
        images[number] = image
    return torch.from_numpy(images)


def _read_image(file: Path) -> NDArray[np.uint8]:
    """(C, H, W)."""
    from PIL import Image

    try:
        # Only these formats: Pillow knows others by their content, some of which start other
        # programs.
        with Image.open(file, formats=("PNG", "JPEG")) as opened:
            return picture_values(opened, str(file))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        if isinstance(problem, checks.InputError):
            raise
        raise checks.InputError(
            f"`{file}` must be an image, got a damaged file ({problem})"
        ) from None


def read_npz(path: Path, split: str) -> Dataset:
    """One split of the file; Python objects (pickles) inside it are an error."""
    checks.require(path.is_file(), "data", "name an .npz file that exists", str(path))
    names, arrays = _read_arrays(path, split)
    splits = [name.removesuffix("_images") for name in names if name.endswith("_images")]
    checks.one_of("split", split, splits or ("train", "test"))
    prefix = f"{split}_" if splits else ""
    for name in (f"{prefix}images", f"{prefix}labels"):
        checks.require(name in arrays, str(path), f"hold `{name}`", ", ".join(names) or "nothing")
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    shape = images.shape
    checks.require(
        images.dtype == np.uint8, f"{prefix}images in {path}", "be uint8", str(images.dtype)
    )
    checks.require(
        len(shape) == 4 and min(shape) > 0 and not shape[3] <= 4 < shape[1],
        f"{prefix}images in {path}",
        "have shape (N, C, H, W)",
        shape,
    )
    checks.require(
        np.issubdtype(labels.dtype, np.integer),
        f"{prefix}labels in {path}",
        "be integers",
        str(labels.dtype),
    )
    classes = _class_names(arrays, path)
    numbers = torch.from_numpy(labels.astype(np.int64))
    checks.labels(numbers, len(classes), shape[0], name=f"{prefix}labels in {path}")
    return whole_split(
        f"npz:{path}", split, torch.from_numpy(np.ascontiguousarray(images)), numbers, classes
    )


def _read_arrays(path: Path, split: str) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """The names in the file, and its arrays except the images of other splits."""
    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist() if name.endswith(".npy")]
            return names, {
                name: limits.read_array(file, name)
                for name in names
                if not name.endswith("_images") or name == f"{split}_images"
            }
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as problem:
        reason = "too little memory" if isinstance(problem, MemoryError) else problem
        raise checks.InputError(
            f"`{path}` must be an .npz file of plain arrays, got {reason}"
        ) from None


def _class_names(arrays: dict[str, NDArray[Any]], path: Path) -> tuple[str, ...]:
    if "classes" in arrays:
        names = arrays["classes"]
        checks.require(
            names.ndim == 1 and names.dtype.kind == "U",
            f"classes in {path}",
            "be a list of text",
            f"{names.dtype} of shape {names.shape}",
        )
        return tuple(names.tolist())
    greatest = max(
        (
            int(values.max())
            for name, values in arrays.items()
            if (name == "labels" or name.endswith("_labels")) and values.size
        ),
        default=-1,
    )
    return limits.numbered_classes(greatest + 1, f"labels in {path}")
