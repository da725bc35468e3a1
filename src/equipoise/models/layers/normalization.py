"""Normalisation as a part of the model, which everything outside gives images in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor, nn

from equipoise.core import checks


@torch.fx.wrap  # a check of concrete shapes, which a symbolic trace of a network keeps as a call
def _check_channels(x: Tensor, channels: int) -> None:
    """Refuse images with other channels; a single one would be broadcast silently."""
    checks.require(x.shape[1] == channels, "images", f"have {channels} channels", tuple(x.shape))


class Normalized(nn.Module):
    """Base class of models that subtract a mean and divide by a standard deviation, per channel, as
    their first step.

    Both are buffers, `mean` and `std` of shape (1, C, 1, 1) at the root, so they move with the
    module and are part of its checkpoint. Every architecture of the zoo is a subclass; its
    `forward` begins with :meth:`normalize`.
    """

    mean: Tensor
    std: Tensor
    config: dict[str, str]
    """`arch`, `num_classes` and `image_shape`: what a checkpoint stores to rebuild the module."""

    def __init__(
        self, channels: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.config = {}
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("std", torch.ones(1, channels, 1, 1))
        self.set_normalization(mean, std)

    def set_normalization(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        """Set the mean and the standard deviation, C numbers each; None leaves 0 or 1 in place."""
        for name, values in (("mean", mean), ("std", std)):
            if values is None:
                continue
            numbers, channels = [float(value) for value in values], self.mean.shape[1]
            checks.require(
                len(numbers) == channels, name, f"hold {channels} numbers, one per channel", numbers
            )
            checks.require(all(map(math.isfinite, numbers)), name, "be finite", numbers)
            valid = min(numbers) > 0 if name == "std" else min(numbers) >= 0
            checks.require(
                valid and max(numbers) <= 1,
                name,
                f"lie in {'(' if name == 'std' else '['}0, 1], as images do",
                numbers,
            )
            setattr(
                self, name, torch.tensor(numbers, device=self.mean.device).view(1, channels, 1, 1)
            )

    def normalize(self, x: Tensor) -> Tensor:
        """(x − mean) / std, (B, C, H, W) → (B, C, H, W); nothing is clamped."""
        _check_channels(x, self.mean.shape[1])
        return (x - self.mean) / self.std


class Normalize(Normalized):
    """Normalisation as a separate layer: `nn.Sequential(Normalize(mean, std), net)`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(len(mean), mean, std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → the same images, normalised."""
        return self.normalize(x)
