"""Data sets from what users have: tensors, numpy arrays, torch data sets and loaders, Pillow
images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from equipoise.core import checks
from equipoise.data import limits
from equipoise.data.dataset import Dataset, pixels, whole_split

if TYPE_CHECKING:
    from PIL import Image

_FORMS = "be a Dataset, a pair of tensors (images, labels) or of numpy arrays, a torch Dataset or a DataLoader"
_ROWS = 1024  # images converted at a time


def as_dataset(
    data: Any, *, name: str = "images", split: str = "test", num_classes: int | None = None
) -> Dataset:
    """A :class:`Dataset` from any of the usual forms of data.

    Args:
        data: a :class:`Dataset` (returned unchanged), a pair of tensors or numpy arrays (images,
            labels), a torch `Dataset` of such pairs (its images may also be Pillow's), or a
            `DataLoader` of such batches, which is read once, in its order. Images (N, C, H, W) are
            uint8, or floating point in [0, 1]; floats that are exact multiples of 1/255 are stored
            as bytes.
        name, split: where the images come from, for results.
        num_classes: by default that of the data set's `classes`, or the greatest label plus one.
    """
    if isinstance(data, Dataset):
        return data
    classes = getattr(getattr(data, "dataset", data), "classes", None)
    if isinstance(data, TorchDataset):
        # A generator of its own, because a loader draws from the global one.
        data = DataLoader(data, batch_size=256, generator=torch.Generator(), collate_fn=_collate)
    if isinstance(data, DataLoader):
        images, labels = _read_batches(data)
    else:
        valid = (
            isinstance(data, tuple | list)
            and len(data) == 2
            and isinstance(data[0], Tensor | np.ndarray)
        )
        checks.require(valid, "data", _FORMS, type(data).__name__)
        images, labels = _compact(_as_tensor(data[0], "images")), _as_tensor(data[1], "labels")
    is_whole = not (labels.is_floating_point() or labels.is_complex())
    greatest = int(labels.max()) if labels.numel() and is_whole else -1
    if num_classes is not None:
        names = limits.numbered_classes(
            checks.whole("num_classes", num_classes, least=1, most=checks.MAX_CLASSES)
        )
    elif isinstance(classes, Sequence) and len(classes) > greatest:
        names = tuple(str(label) for label in classes)
    else:
        names = limits.numbered_classes(greatest + 1)
    return whole_split(name, split, images, checks.labels(labels, len(names), len(images)), names)


def picture_values(picture: Image.Image, name: str) -> NDArray[np.uint8]:
    """(C, H, W) of a Pillow image; palettes and black-and-white are converted exactly, transparency
    is an error."""
    checks.require(
        picture.width * picture.height <= limits.MAX_PIXELS,
        name,
        f"have at most {limits.MAX_PIXELS} pixels",
        f"{picture.width} x {picture.height}",
    )  # before they are decoded
    mode = {"1": "L", "P": "RGB"}.get(picture.mode, picture.mode)
    transparent = "transparency" in picture.info
    checks.require(
        mode in ("L", "RGB") and not transparent,
        name,
        "be grey or RGB with 8 bits and no transparency",
        "transparency" if transparent else mode,
    )
    values = np.array(picture.convert(mode), np.uint8)
    return values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)


def _as_tensor(values: Any, name: str) -> Tensor:
    """Tensors as they are, copied if they were made in inference mode; anything else by numpy."""
    if isinstance(values, Tensor):
        checks.require(
            values.layout == torch.strided and not values.is_meta,
            name,
            "hold its values",
            f"{values.layout} on {values.device}",
        )
        return values.clone() if values.is_inference() else values.detach()
    try:
        array = np.array(values)
        # torch has no unsigned integers beyond bytes.
        array = array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array
        return torch.from_numpy(array)
    except (TypeError, ValueError, OverflowError):
        raise checks.InputError(
            f"`{name}` must be a tensor or an array of numbers, got {type(values).__name__!r}"
        ) from None


def _as_image(value: Any) -> Tensor:
    from PIL import Image

    return (
        torch.from_numpy(picture_values(value, "image").copy())
        if isinstance(value, Image.Image)
        else _as_tensor(value, "images")
    )


def _collate(items: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """A batch of a torch data set."""
    for item in items:
        checks.require(
            isinstance(item, tuple | list) and len(item) == 2,
            "data",
            "give pairs (image, label)",
            type(item).__name__,
        )
    images, labels = (
        [_as_image(image) for image, _ in items],
        [_as_tensor(label, "labels") for _, label in items],
    )
    for name, values in (("images", images), ("labels", labels)):
        shapes = {tuple(value.shape) for value in values}
        checks.require(len(shapes) == 1, name, "be of one shape", sorted(shapes)[:3])
    return torch.stack(images), torch.stack(labels)


def _read_batches(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All images and labels; every batch is stored as bytes where that is exact, so that floats
    never pile up."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    try:
        for batch in loader:
            pair = (
                isinstance(batch, tuple | list)
                and len(batch) == 2
                and all(isinstance(x, Tensor) for x in batch)
            )
            checks.require(
                pair, "data", "give batches of tensors (images, labels)", type(batch).__name__
            )
            images.append(_compact(_as_tensor(batch[0], "images")))
            labels.append(_as_tensor(batch[1], "labels"))
    except TypeError as problem:
        if "collate" not in str(problem):
            raise
        raise checks.InputError(
            "`data` must give batches of tensors (images, labels), got others: convert the images "
            "of the loader to tensors, or pass its data set"
        ) from None
    checks.require(bool(images), "data", "hold at least one image", 0)
    for name, parts in (("images", images), ("labels", labels)):
        shapes = {tuple(part.shape[1:]) for part in parts}
        checks.require(len(shapes) == 1, name, "be of one shape", sorted(shapes)[:3])
    if any(part.is_floating_point() for part in images):
        images = [pixels(part) for part in images]
    return torch.cat(images), torch.cat(labels)


def _compact(images: Tensor) -> Tensor:
    """(N, C, H, W) as bytes where nothing is lost, and as float32 otherwise."""
    checks.require(
        images.dim() == 4 and min(images.shape[1:]) > 0,
        "images",
        "have shape (N, C, H, W)",
        tuple(images.shape),
    )
    checks.require(len(images) > 0, "images", "hold at least one image", 0)
    if images.dtype == torch.uint8:
        return images
    checks.images(images)
    levels = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    for rows in torch.arange(len(images)).split(_ROWS):
        part = images[rows[0] : rows[-1] + 1].float()
        rounded = (part * 255).round()
        if not torch.equal(rounded / 255, part):
            return images.float()
        levels[rows[0] : rows[-1] + 1] = rounded.to(torch.uint8)
    return levels
