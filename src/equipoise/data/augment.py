"""Random crops and flips on the device, each image by its own chance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import checks
from equipoise.core.rng import Stream


def crop(x: Tensor, pad: int, stream: Stream) -> Tensor:
    """Surround each image by `pad` zeros and cut a window of the old size at a random place.

    Args:
        x: (B, C, H, W) of any type.
        pad: zeros on every side; each of the (2 pad + 1)² windows is equally likely.
        stream: the chance of these B images.

    Returns:
        (B, C, H, W) of the same type.
    """
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
