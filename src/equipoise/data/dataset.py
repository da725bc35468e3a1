"""Images, labels and positions in a split, in memory; their batches, and random crops and flips of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from equipoise.core import checks, rng
from equipoise.core.rng import Stream


@dataclass(frozen=True, eq=False)
class Dataset:
    """N images with labels.

    Images are stored as bytes where possible, which is exact and a quarter of the memory; :func:`pixels`
    makes them floats. `index` is the position of each image in its split. It is stored with results and selects the
    random numbers of an image, so every slice keeps it.
    """

    name: str
    split: str
    images: Tensor  # (N, C, H, W) uint8, or float32 in [0, 1]
    labels: Tensor  # (N,) int64
    index: Tensor  # (N,) int64
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        dtype = self.images.dtype
        checks.require(dtype in (torch.uint8, torch.float32), "images", "be uint8 or float32", str(dtype))
        checks.require(len(shape) == 4 and min(shape[1:]) > 0, "images", "have shape (N, C, H, W)", shape)
        if self.images.is_floating_point():
            checks.images(self.images)
        checks.require(self.labels.dtype == torch.int64, "labels", "be int64", str(self.labels.dtype))
        checks.labels(self.labels, self.num_classes, count=shape[0])
        valid = self.index.dtype == torch.int64 and tuple(self.index.shape) == shape[:1]
        checks.require(valid, "index", f"be int64 of shape ({shape[0]},)",
                       f"{self.index.dtype} of shape {tuple(self.index.shape)}")
        lowest = int(self.index.min()) if len(self) else 0
        checks.require(lowest >= 0, "index", "not be negative", lowest)

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"{self.name} {self.split} ({len(self)} images)"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    def slice(self, start: int, count: int) -> Dataset:
        """Exactly `count` images from `start` on; a slice that does not fit is an error."""
        checks.whole("start", start)
        checks.whole("count", count, least=1)
        checks.require(start < len(self), "start", f"be at most {len(self) - 1} in {self}", start)
        checks.require(count <= len(self) - start, "count",
                       f"be at most {len(self) - start} from `start` {start} in {self}", count)
        return self.take(torch.arange(start, start + count))

    def take(self, rows: Tensor) -> Dataset:
        """The given rows, in the given order; `rows` are positions or a mask."""
        return dataclasses.replace(self, images=self.images[rows], labels=self.labels[rows], index=self.index[rows])

    def digest(self) -> str:
        """SHA-256 over shape, images, labels and index: equal digests mean equal data on any machine."""
        total = hashlib.sha256(str(tuple(self.images.shape)).encode())
        if self.images.is_floating_point():
            total.update(b"float32")
        total.update(self.images.cpu().contiguous().numpy().data)
        for numbers in (self.labels, self.index):
            total.update(numbers.cpu().numpy().astype("<i8").tobytes())
        return total.hexdigest()

    def describe(self) -> dict[str, str | int]:
        """What distinguishes this part of a data set from any other, for `run.toml`."""
        return {"name": self.name, "split": self.split, "count": len(self), "digest": self.digest()}


def whole_split(name: str, split: str, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> Dataset:
    """A complete split: image i has index i."""
    checks.require(len(images) > 0, f"{name} {split}", "hold at least one image", len(images))
    return Dataset(name, split, images, labels.to(torch.int64), torch.arange(len(images)), classes)


def as_dataset(data: Any, *, name: str = "images", split: str = "test", num_classes: int | None = None) -> Dataset:
    """A :class:`Dataset` from any of the usual forms of data.

    Args:
        data: a :class:`Dataset` (returned unchanged), a pair of tensors (images, labels), a torch `Dataset` of such
            pairs, or a `DataLoader` of such batches, which is read once, in its order. Images are uint8, or floating
            point in [0, 1]; floats that are exact multiples of 1/255 are stored as bytes.
        name, split: where the images come from, for results.
        num_classes: by default that of the data set's `classes`, or the greatest label plus one.
    """
    if isinstance(data, Dataset):
        return data
    classes = getattr(getattr(data, "dataset", data), "classes", None)
    if isinstance(data, TorchDataset):
        # A generator of its own, because a loader draws from the global one.
        data = DataLoader(data, batch_size=256, generator=torch.Generator())
    if isinstance(data, DataLoader):
        pairs = [batch if isinstance(batch, tuple | list) else () for batch in data]
        valid = all(len(pair) == 2 and all(isinstance(part, Tensor) for part in pair) for pair in pairs)
        checks.require(bool(pairs) and valid, "data", "give batches of tensors (images, labels)", type(data).__name__)
        data = (torch.cat([images for images, _ in pairs]), torch.cat([labels for _, labels in pairs]))
    if not isinstance(data, tuple | list) or len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
        raise checks.InputError("`data` must be a Dataset, a pair of tensors (images, labels), a torch Dataset or a "
                                f"DataLoader, got {type(data).__name__!r}")
    images, labels = data
    greatest = int(labels.max()) if labels.numel() and not labels.is_floating_point() else -1
    names = [str(number) for number in range(greatest + 1 if num_classes is None else num_classes)]
    if num_classes is None and classes is not None and len(classes) > greatest:
        names = [str(label) for label in classes]
    return whole_split(name, split, _compact(images), checks.labels(labels, len(names), len(images)), tuple(names))


def _compact(images: Tensor) -> Tensor:
    """Floats as bytes where nothing is lost, and as float32 otherwise."""
    if images.dtype == torch.uint8:
        return images
    images = checks.images(images).float()
    levels = (images * 255).round()
    return levels.to(torch.uint8) if torch.equal(levels / 255, images) else images


@dataclass(frozen=True, eq=False)
class Batch:
    """B images in [0, 1] with labels and positions in the split."""

    images: Tensor  # (B, C, H, W) floating point
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64

    def __len__(self) -> int:
        return len(self.images)


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images as floats in [0, 1]: bytes are divided by 255, rounded once; floats stay as they are."""
    if images.is_floating_point():
        return images.to(dtype)
    # CUDA turns a division by a Python number into a multiplication by the rounded 1/255; division by a tensor gives
    # an image the same bits on every device.
    return images.to(dtype) / torch.full((), 255, dtype=dtype, device=images.device)


def order(index: Tensor, *, seed: int, epoch: int) -> Tensor:
    """(N,) a random permutation of rows: a function of the seed, the epoch and the images' positions only."""
    return rng.stream(seed, "shuffle", index).at("epoch", epoch).words().argsort(stable=True)


def batches(dataset: Dataset, batch_size: int, *, device: torch.device | str) -> Iterator[Batch]:
    """Every image once, in order; the last batch may be smaller."""
    starts = range(0, len(dataset), checks.whole("batch_size", batch_size, least=1))
    parts = (dataset.take(torch.arange(start, min(start + batch_size, len(dataset)))) for start in starts)
    return (Batch(pixels(part.images.to(device)), part.labels.to(device), part.index.to(device)) for part in parts)


def crop(x: Tensor, pad: int, stream: Stream) -> Tensor:
    """Pad each (C, H, W) of `x` with `pad` zeros on every side and cut a window of the original size, at random."""
    checks.whole("pad", pad)
    count, channels, height, width = x.shape
    corner = stream.to(x.device).at("crop").integers(2 * pad + 1, 2)  # (B, 2)
    image = torch.arange(count, device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
    row = corner[:, 0].view(-1, 1, 1, 1) + torch.arange(height, device=x.device).view(1, 1, -1, 1)
    column = corner[:, 1].view(-1, 1, 1, 1) + torch.arange(width, device=x.device).view(1, 1, 1, -1)
    return F.pad(x, (pad, pad, pad, pad))[image, channel, row, column]


def flip(x: Tensor, stream: Stream) -> Tensor:
    """Mirror each (C, H, W) of `x` left to right with probability one half."""
    mirrored = stream.to(x.device).at("flip").integers(2).bool()  # (B,)
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)
