"""A split, or a part of one, in memory: images, labels, and which image each row is."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks


@dataclass(frozen=True, eq=False)
class Dataset:
    """N images with labels.

    Pixels stay bytes until they are batched, a quarter of the memory and exact. `index` is the position of
    each image in its split; rows on disk and chance carry it, so it survives every slice.
    """

    name: str
    split: str
    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    index: Tensor  # (N,) int64
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        checks.require(self.images.dtype == torch.uint8, "images", "be uint8", str(self.images.dtype))
        checks.require(len(shape) == 4 and min(shape[1:]) > 0, "images", "have shape (N, C, H, W)", shape)
        checks.require(self.labels.dtype == torch.int64, "labels", "be int64", str(self.labels.dtype))
        checks.labels(self.labels, self.num_classes, count=shape[0])
        numbered = self.index.dtype == torch.int64 and tuple(self.index.shape) == shape[:1]
        checks.require(numbered, "index", f"be int64 of shape ({shape[0]},)",
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
        """Exactly `count` images from `start` on; reaching outside is an error, never cut short."""
        checks.whole("start", start)
        checks.whole("count", count, least=1)
        checks.require(start < len(self), "start", f"be at most {len(self) - 1} in {self}", start)
        checks.require(count <= len(self) - start, "count",
                       f"be at most {len(self) - start} from `start` {start} in {self}", count)
        return self.take(torch.arange(start, start + count))

    def take(self, rows: Tensor) -> Dataset:
        """The given rows, in the given order; `rows` are positions or a mask."""
        return dataclasses.replace(self, images=self.images[rows], labels=self.labels[rows],
                                   index=self.index[rows])

    def digest(self) -> str:
        """SHA-256 over shape, images, labels and index: equal digests mean equal data on any machine."""
        total = hashlib.sha256(str(tuple(self.images.shape)).encode())
        total.update(self.images.cpu().contiguous().numpy().data)
        for numbers in (self.labels, self.index):
            total.update(numbers.cpu().numpy().astype("<i8").tobytes())
        return total.hexdigest()

    def facts(self) -> dict[str, str | int]:
        """What tells this part of a data set from any other, as it stands in `run.toml`."""
        return {"name": self.name, "split": self.split, "count": len(self), "digest": self.digest()}


def whole_split(name: str, split: str, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> Dataset:
    """A complete split: the images are numbered as they stand."""
    checks.require(len(images) > 0, f"{name} {split}", "hold at least one image", len(images))
    return Dataset(name, split, images, labels.to(torch.int64), torch.arange(len(images)), classes)
