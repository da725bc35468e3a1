"""Images, labels and positions in a split, in memory; their batches, and random crops and flips of
them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.core.rng import Stream


@dataclass(frozen=True, eq=False)
class Dataset:
    """N images with labels.

    Images are stored as bytes where possible, which is exact and a quarter of the memory;
    :func:`pixels` makes them floats. `index` is the position of each image in its split. It is
    stored with results and selects the random numbers of an image, so every slice keeps it. So does
    it keep `split_counts`, the number of images of each class in the whole split (empty if
    unknown), and how the images were sampled (None: in order).
    """

    name: str
    split: str
    images: Tensor  # (N, C, H, W) uint8, or float32 in [0, 1]
    labels: Tensor  # (N,) int64
    index: Tensor  # (N,) int64
    classes: tuple[str, ...]
    split_counts: tuple[int, ...] = ()
    sample: str | None = None  # such as "stratified, seed 0"

    def __post_init__(self) -> None:
        for name in ("name", "split"):
            checks.instance(name, getattr(self, name), str, "be text")
        checks.optional("sample", self.sample, str, "be text")
        for name in ("images", "labels", "index"):
            value = checks.instance(name, getattr(self, name), Tensor, "be a tensor")
            checks.require(
                value.layout == torch.strided and not value.is_meta,
                name,
                "hold its values",
                f"{value.layout} on {value.device}",
            )
        named = isinstance(self.classes, tuple) and all(
            isinstance(name, str) for name in self.classes
        )
        checks.require(named, "classes", "be a tuple of names", type(self.classes).__name__)
        counted = (
            isinstance(self.split_counts, tuple)
            and len(self.split_counts) <= len(self.classes)
            and all(type(count) is int and count >= 0 for count in self.split_counts)
        )
        checks.require(
            counted,
            "split_counts",
            "be a tuple of at most as many numbers as classes",
            self.split_counts,
        )
        shape = tuple(self.images.shape)
        dtype = self.images.dtype
        checks.require(
            dtype in (torch.uint8, torch.float32), "images", "be uint8 or float32", str(dtype)
        )
        checks.require(
            len(shape) == 4 and min(shape[1:]) > 0, "images", "have shape (N, C, H, W)", shape
        )
        if self.images.is_floating_point():
            checks.images(self.images)
        checks.require(
            self.labels.dtype == torch.int64, "labels", "be int64", str(self.labels.dtype)
        )
        checks.labels(self.labels, self.num_classes, count=shape[0])
        valid = self.index.dtype == torch.int64 and tuple(self.index.shape) == shape[:1]
        checks.require(
            valid,
            "index",
            f"be int64 of shape ({shape[0]},)",
            f"{self.index.dtype} of shape {tuple(self.index.shape)}",
        )
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
        return self.take(self.rows(start, count))

    def rows(self, start: int, count: int) -> Tensor:
        """The positions from `start` on, exactly `count`; more than there are is an error."""
        checks.whole("start", start)
        checks.whole("count", count, least=1)
        checks.require(start < len(self), "start", f"be at most {len(self) - 1} in {self}", start)
        checks.require(
            count <= len(self) - start,
            "count",
            f"be at most {len(self) - start} from `start` {start} in {self}",
            count,
        )
        return torch.arange(start, start + count)

    def take(self, rows: Tensor) -> Dataset:
        """The given rows, in the given order; `rows` are positions or a mask. All rows are no
        copy."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero().squeeze(1)
        if torch.equal(rows, torch.arange(len(self), device=rows.device)):
            return self
        return dataclasses.replace(
            self, images=self.images[rows], labels=self.labels[rows], index=self.index[rows]
        )

    def labels_by_index(self) -> dict[int, int]:
        """Index → label of every image."""
        return dict(zip(self.index.tolist(), self.labels.tolist(), strict=True))

    def digest(self) -> str:
        """SHA-256 over shape, images, labels and index: equal digests mean equal data on any
        machine."""
        total = hashlib.sha256(str(tuple(self.images.shape)).encode())
        if self.images.is_floating_point():
            total.update(b"float32")
        total.update(self.images.cpu().contiguous().numpy().data)
        for numbers in (self.labels, self.index):
            total.update(numbers.cpu().numpy().astype("<i8").tobytes())
        return total.hexdigest()

    def image_digests(self) -> NDArray[np.uint64]:
        """(N,) 64 bits for each image, which depend on its pixels alone: the same image has the
        same in any data."""
        kind = hashlib.blake2b(f"{self.images.dtype} {self.image_shape}".encode(), digest_size=8)
        digests = []
        for image in self.images.cpu().contiguous().numpy():
            digest = kind.copy()
            digest.update(image)
            digests.append(digest.digest())
        return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)

    def describe(self) -> dict[str, str | int]:
        """What distinguishes this part of a data set from any other, for `run.toml`."""
        sample = {} if self.sample is None else {"sample": self.sample}
        return {
            "name": self.name,
            "split": self.split,
            "count": len(self),
            **sample,
            "digest": self.digest(),
        }


def whole_split(
    name: str, split: str, images: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> Dataset:
    """A complete split: image i has index i."""
    checks.require(len(images) > 0, f"{name} {split}", "hold at least one image", len(images))
    labels = checks.labels(labels.to(torch.int64), len(classes), len(images))
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    return Dataset(name, split, images, labels, torch.arange(len(images)), classes, tuple(counts))


@dataclass(frozen=True, eq=False)
class Batch:
    """B images in [0, 1] with labels and positions in the split."""

    images: Tensor  # (B, C, H, W) floating point
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64

    def __len__(self) -> int:
        return len(self.images)


def pixels(images: Tensor) -> Tensor:
    """Images as contiguous floats in [0, 1]: bytes are divided by 255, rounded once; floats stay as
    they are."""
    images = images.contiguous()  # a network that flattens with `.view` needs it
    if images.is_floating_point():
        return images.to(torch.float32)
    # CUDA turns a division by a Python number into a multiplication by the rounded 1/255; division
    # by a tensor gives an image the same bits on every device.
    return images.to(torch.float32) / torch.full((), 255.0, device=images.device)


def as_images(x: Tensor) -> Tensor:
    """(B, C, H, W) contiguous floats in [0, 1] from bytes, or from floats that are checked."""
    is_bytes = isinstance(x, Tensor) and x.dtype == torch.uint8
    return checks.images(pixels(x) if is_bytes else x, "images").contiguous()


def order(index: Tensor, *, seed: int, epoch: int) -> Tensor:
    """(N,) a random permutation of rows: a function of the seed, the epoch and the images'
    positions only."""
    return rng.stream(seed, "shuffle", index).at("epoch", epoch).words().argsort(stable=True)


def batches(dataset: Dataset, batch_size: int, *, device: torch.device | str) -> Iterator[Batch]:
    """Every image once, in order; the last batch may be smaller."""
    starts = range(0, len(dataset), checks.whole("batch_size", batch_size, least=1))
    parts = (
        dataset.take(torch.arange(start, min(start + batch_size, len(dataset)))) for start in starts
    )
    return (
        Batch(pixels(part.images.to(device)), part.labels.to(device), part.index.to(device))
        for part in parts
    )


def crop(x: Tensor, pad: int, stream: Stream) -> Tensor:
    """Pad each (C, H, W) of `x` with `pad` zeros on every side and cut a window of the original
    size, at random."""
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
