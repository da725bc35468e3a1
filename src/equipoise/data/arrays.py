"""A numpy `.npz` file: `images` (N, C, H, W) uint8 and `labels` (N,) whole numbers, optionally `classes`.

Several splits in one file are `<split>_images` and `<split>_labels`; plain `images` and `labels` are one
split that answers to train and to test. Floats and (N, H, W, C) are refused rather than converted by a guess.
Without `classes` (text, one a class) they are numbered up to the greatest label of all splits in the file.
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
from equipoise.data.dataset import Dataset, whole_split


def read(path: Path, split: str) -> Dataset:
    """One split of the file; objects (pickles) inside it are refused."""
    checks.require(path.is_file(), "data", "name an .npz file that exists", str(path))
    names, arrays = _read_file(path, split)
    splits = [name.removesuffix("_images") for name in names if name.endswith("_images")]
    checks.one_of("split", split, splits or ("train", "test"))
    prefix = f"{split}_" if splits else ""
    for name in (f"{prefix}images", f"{prefix}labels"):
        checks.require(name in arrays, str(path), f"hold `{name}`", ", ".join(names) or "nothing")
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    shape = images.shape
    checks.require(images.dtype == np.uint8, f"{prefix}images in {path}", "be uint8", str(images.dtype))
    checks.require(len(shape) == 4 and min(shape) > 0 and not shape[3] <= 4 < shape[1],
                   f"{prefix}images in {path}", "have shape (N, C, H, W)", shape)
    checks.require(np.issubdtype(labels.dtype, np.integer), f"{prefix}labels in {path}", "be whole numbers",
                   str(labels.dtype))
    classes = _classes(arrays, path)
    numbers = torch.from_numpy(labels.astype(np.int64))
    checks.labels(numbers, len(classes), shape[0], name=f"{prefix}labels in {path}")
    return whole_split(f"npz:{path}", split, torch.from_numpy(np.ascontiguousarray(images)), numbers, classes)


def _read_file(path: Path, split: str) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """The names in the file, and its arrays but for the images of other splits."""
    try:
        with path.open("rb") as raw:  # numpy would leave a damaged file open
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("a single array")
            return file.files, {name: file[name] for name in file.files
                                if not name.endswith("_images") or name == f"{split}_images"}
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as problem:
        raise checks.InputError(f"`{path}` must be an .npz file of plain arrays, got {problem}") from None


def _classes(arrays: dict[str, NDArray[Any]], path: Path) -> tuple[str, ...]:
    if "classes" in arrays:
        names = arrays["classes"]
        checks.require(names.ndim == 1 and names.dtype.kind == "U", f"classes in {path}", "be a list of text",
                       f"{names.dtype} of shape {names.shape}")
        return tuple(names.tolist())
    greatest = max((int(values.max()) for name, values in arrays.items()
                    if (name == "labels" or name.endswith("_labels")) and values.size), default=-1)
    return tuple(str(number) for number in range(greatest + 1))
