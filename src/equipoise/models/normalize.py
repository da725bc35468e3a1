"""Normalisation as part of the model, so that everything outside it sees images in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core import checks


class Normalized(nn.Module):
    """A module that owns the mean and standard deviation of its images.

    They are buffers `mean` and `std` of shape (1, C, 1, 1) at the root, so they move with the module and
    travel in its checkpoint. Every architecture of the zoo is one; its `forward` begins with `normalize`.

    Args:
        channels: C.
        mean: C numbers; zero where left out.
        std: C positive numbers; one where left out.
    """

    mean: Tensor
    std: Tensor
    identity: dict[str, str]
    """What a checkpoint says to rebuild the module: `arch`, `num_classes`, `image_shape`."""

    def __init__(
        self, channels: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.identity = {}
        mean = [0.0] * channels if mean is None else mean
        std = [1.0] * channels if std is None else std
        self.register_buffer("mean", _per_channel("mean", mean, channels))
        self.register_buffer("std", _per_channel("std", std, channels))

    def normalize(self, x: Tensor) -> Tensor:
        """(x − mean) / std, (B, C, H, W) → (B, C, H, W); nothing is clamped."""
        # One channel would broadcast to C without a word.
        checks.require(x.shape[1] == self.mean.shape[1], "images", f"have {self.mean.shape[1]} channels",
                       tuple(x.shape))
        return (x - self.mean) / self.std


class Normalize(Normalized):
    """Normalisation as a layer of its own: `nn.Sequential(Normalize(mean, std), net)`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(len(mean), mean, std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → the same images, normalised."""
        return self.normalize(x)


def _per_channel(name: str, values: Sequence[float], channels: int) -> Tensor:
    """C checked numbers as a tensor of shape (1, C, 1, 1)."""
    numbers = [float(value) for value in values]
    checks.require(len(numbers) == channels, name, f"hold {channels} numbers, one per channel", numbers)
    checks.require(all(map(math.isfinite, numbers)), name, "be finite", numbers)
    if name == "std":
        checks.require(min(numbers) > 0 and max(numbers) <= 1, name, "lie in (0, 1], as images do", numbers)
    else:
        checks.require(min(numbers) >= 0 and max(numbers) <= 1, name, "lie in [0, 1], as images do", numbers)
    return torch.tensor(numbers).view(1, channels, 1, 1)
