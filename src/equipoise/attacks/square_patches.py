"""The patches of Square [Andriushchenko2020]: their places and signs from random words, and the bumps of ℓ2 and ℓ1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uniform_below(words: Tensor, high: Tensor) -> Tensor:
    """(B,) uniform in 0 … high − 1."""
    return (words * high) >> 32


def signs_of(words: Tensor) -> Tensor:
    """(B, n) words → ±1."""
    return (words >> 31).to(torch.float32) * 2 - 1


def window_mask(top: Tensor, left: Tensor, side: Tensor, height: int, width: int) -> Tensor:
    """(B, 1, H, W) true inside the square of every row."""
    i = torch.arange(height, device=top.device).view(1, 1, -1, 1)
    j = torch.arange(width, device=top.device).view(1, 1, 1, -1)
    top, left, side = (value.view(-1, 1, 1, 1) for value in (top, left, side))
    return (i >= top) & (i < top + side) & (j >= left) & (j < left + side)


def make_bumps(sides: Sequence[int], height: int, width: int, like: Tensor, norm: str = "l2") -> Tensor:
    """(S, H, W) one bump per edge in the upper left corner, each of length one in the norm.

    The upper half is a positive bump, the lower half a negative one [Andriushchenko2020, section 3.4].
    """
    table = torch.zeros(len(sides), height, width, dtype=torch.float64)
    for number, side in enumerate(sides):
        half = side // 2
        table[number, :half, :side] = _half_bump(half, side, norm)
        table[number, half:side, :side] = -_half_bump(side - half, side, norm)
        table[number] /= _length(table[number], norm)
    return table.to(like.device, like.dtype)


def _half_bump(height: int, width: int, norm: str) -> Tensor:
    """Rings around the centre, the k-th adding 1/k² (in ℓ1 1/k⁴) to itself and everything inside it."""
    bump = torch.zeros(height, width, dtype=torch.float64)
    top, left = height // 2, width // 2
    for ring in range(max(top, left) + 1):
        bump[max(top - ring, 0) : top + ring + 1, max(left - ring, 0) : left + ring + 1] += (
            1 / (ring + 1) ** (2 if norm == "l2" else 4))
    return bump / _length(bump, norm) if height else bump


def _length(bump: Tensor, norm: str) -> Tensor:
    return bump.square().sum().sqrt() if norm == "l2" else bump.abs().sum()
