"""The patches of Square [Andriushchenko2020]: their places and signs from random words, and the
bumps of ℓ2 and ℓ1. Those of many queries are computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.attacks.search_state import Rows


@dataclass(frozen=True, eq=False)
class Window(Rows):
    """A square of pixels for every query (…,): where it begins, and what it covers of both axes."""

    top: Tensor  # (…,)
    left: Tensor  # (…,)
    rows: Tensor  # (…, H) true inside
    columns: Tensor  # (…, W) true inside

    @classmethod
    def draw(cls, words: Tensor, side: Tensor, height: int, width: int) -> Window:
        """Uniform places from random words (…, 2), for edges of `side` (…,) pixels."""
        top, left = (
            uniform_below(words[..., axis], size - side + 1)
            for axis, size in enumerate((height, width))
        )
        return cls(top, left, _covered(top, side, height), _covered(left, side, width))

    def mask(self) -> Tensor:
        """(B, 1, H, W) true inside, of windows (B,)."""
        return self.rows[:, None, :, None] & self.columns[:, None, None, :]


@dataclass(frozen=True, eq=False)
class SquarePatches(Rows):
    """Patches of ℓ∞ for every query: each channel of a window goes to one end of its range."""

    window: Window
    is_high: Tensor  # (…, C) whether that is the upper end


@dataclass(frozen=True, eq=False)
class BumpPatches(Rows):
    """Patches of ℓ2 and ℓ1 for every query: a bump in one window takes the mass of another, which
    is emptied."""

    # (…,) how often the share of pixels was halved; it gives the edge of both windows
    halvings: Tensor
    window: Window
    emptied: Window
    is_turned: Tensor  # (…,) whether the bump is transposed
    signs: Tensor  # (…, C) ±1

    def place(self, bumps: Tensor) -> Tensor:
        """(B, 1, H, W) the bumps of :func:`make_bumps` at the places of patches (B,); correct
        inside `window` only."""
        height, width = bumps.shape[1:]
        last, flip = min(height, width) - 1, self.is_turned.view(-1, 1, 1)
        i, j = (
            (torch.arange(size, device=bumps.device) - start.unsqueeze(1)).clamp(0, last)
            for size, start in ((height, self.window.top), (width, self.window.left))
        )
        i, j = i.unsqueeze(2), j.unsqueeze(1)  # (B, H, 1) and (B, 1, W)
        # A turned bump is a transposed one: rows and columns change places.
        which = self.halvings.view(-1, 1, 1), torch.where(flip, j, i), torch.where(flip, i, j)
        return bumps[which].unsqueeze(1)


def _covered(start: Tensor, side: Tensor, size: int) -> Tensor:
    """(…, size) true from `start` (…,) on, for `side` positions of an axis."""
    position = torch.arange(size, device=start.device)
    return (position >= start.unsqueeze(-1)) & (position < (start + side).unsqueeze(-1))


def uniform_below(words: Tensor, high: Tensor) -> Tensor:
    """(…,) uniform in 0 … high − 1."""
    return (words * high) >> 32


def signs_of(words: Tensor) -> Tensor:
    """(…,) words → ±1."""
    return (words >> 31).to(torch.float32) * 2 - 1


def make_bumps(
    sides: Sequence[int], height: int, width: int, like: Tensor, norm: str = "l2"
) -> Tensor:
    """(S, H, W) one bump per edge in the upper left corner, each of length one in the norm.

    The upper half is a positive bump, the lower half a negative one [Andriushchenko2020, section
    3.4].
    """
    table = torch.zeros(len(sides), height, width, dtype=torch.float64)
    for number, side in enumerate(sides):
        half = side // 2
        table[number, :half, :side] = _half_bump(half, side, norm)
        table[number, half:side, :side] = -_half_bump(side - half, side, norm)
        table[number] /= _length(table[number], norm)
    return table.to(like.device, like.dtype)


def _half_bump(height: int, width: int, norm: str) -> Tensor:
    """Rings around the centre, the k-th adding 1/k² (in ℓ1 1/k⁴) to itself and everything inside
    it."""
    bump = torch.zeros(height, width, dtype=torch.float64)
    top, left = height // 2, width // 2
    for ring in range(max(top, left) + 1):
        bump[max(top - ring, 0) : top + ring + 1, max(left - ring, 0) : left + ring + 1] += 1 / (
            ring + 1
        ) ** (2 if norm == "l2" else 4)
    return bump / _length(bump, norm) if height else bump


def _length(bump: Tensor, norm: str) -> Tensor:
    return bump.square().sum().sqrt() if norm == "l2" else bump.abs().sum()
