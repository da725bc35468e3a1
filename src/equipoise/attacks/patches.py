"""The shapes that the Square attack draws: windows, and bumps that fall off from their centres."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def windows(top: Tensor, left: Tensor, side: Tensor, height: int, width: int) -> Tensor:
    """(B, 1, H, W) true inside the square of every row."""
    i = torch.arange(height, device=top.device).view(1, 1, -1, 1)
    j = torch.arange(width, device=top.device).view(1, 1, 1, -1)
    top, left, side = (value.view(-1, 1, 1, 1) for value in (top, left, side))
    return (i >= top) & (i < top + side) & (j >= left) & (j < left + side)


def bumps(sides: Sequence[int], height: int, width: int, like: Tensor) -> Tensor:
    """(S, H, W) one bump per side in the upper left corner, each of Euclidean length one.

    The upper half is a positive bump, the lower half a negative one [Andriushchenko2020, section 3.4].
    """
    table = torch.zeros(len(sides), height, width, dtype=torch.float64)
    for number, side in enumerate(sides):
        half = side // 2
        table[number, :half, :side] = _bump(half, side)
        table[number, half:side, :side] = -_bump(side - half, side)
        table[number] /= table[number].square().sum().sqrt()
    return table.to(like.device, like.dtype)


def _bump(height: int, width: int) -> Tensor:
    """Rings around the centre, the k-th adding 1/k² to itself and everything inside it."""
    bump = torch.zeros(height, width, dtype=torch.float64)
    top, left = height // 2, width // 2
    for ring in range(max(top, left) + 1):
        bump[max(top - ring, 0) : top + ring + 1, max(left - ring, 0) : left + ring + 1] += 1 / (ring + 1) ** 2
    return bump / bump.square().sum().sqrt() if height else bump
