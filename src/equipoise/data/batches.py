"""From bytes to batches in [0, 1], in order or shuffled; every image once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Batch:
    """B images in [0, 1] with labels and positions in the split."""

    images: Tensor  # (B, C, H, W) floating point
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64

    def __len__(self) -> int:
        return len(self.images)


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes as numbers in [0, 1]: value / 255, rounded once."""
    # A Python 255 would become a multiplication by a rounded 1/255 on CUDA; a tensor there is divided by,
    # so that an image has the same bits on every device.
    return images.to(dtype) / torch.full((), 255, dtype=dtype, device=images.device)


def order(index: Tensor, *, seed: int, epoch: int) -> Tensor:
    """(N,) a permutation of rows, a function of (seed, epoch) and of which images there are; nothing else."""
    return rng.stream(seed, "shuffle", index).at("epoch", epoch).words().argsort(stable=True)


def batches(dataset: Dataset, batch_size: int, *, device: torch.device | str) -> Iterator[Batch]:
    """Every image once, in order; the last batch may be smaller."""
    checks.whole("batch_size", batch_size, least=1)
    return _cut(dataset, torch.arange(len(dataset)), batch_size, device)


def shuffled(dataset: Dataset, batch_size: int, *, seed: int, epoch: int, device: torch.device | str,
             drop_last: bool = False) -> Iterator[Batch]:
    """Every image once, in the :func:`order` of this epoch.

    With `drop_last` the images left over after the last full batch are not seen in this epoch.
    """
    checks.whole("batch_size", batch_size, least=1)
    rows = order(dataset.index, seed=seed, epoch=epoch)
    if drop_last:
        rows = rows[: len(rows) - len(rows) % batch_size]
    return _cut(dataset, rows, batch_size, device)


def _cut(dataset: Dataset, rows: Tensor, batch_size: int, device: torch.device | str) -> Iterator[Batch]:
    for start in range(0, len(rows), batch_size):
        part = dataset.take(rows[start : start + batch_size])
        yield Batch(pixels(part.images.to(device)), part.labels.to(device), part.index.to(device))
