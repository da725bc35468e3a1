"""The smallest move inside the box onto a hyperplane, for whole batches and without sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core import geometry

ROUNDS = {"cpu": 12, "cuda": 8}  # on CUDA looking whether it is over would cost more than the last rounds


def onto(x: Tensor, w: Tensor, value: Tensor, norm: str) -> Tensor:
    r"""The smallest d (in the norm) with value + w·d = 0 and x + d in [0, 1]; as far as possible if none is.

    Moving against the sign of `value`, coordinate i gains |w_i|·m_i, where m_i = min(λ, room_i) for ℓ∞ and
    min(λ|w_i|, room_i) for ℓ2. The total gain is concave and piecewise linear in λ, so Newton's method from
    λ = 0 climbs to the solution from below, never beyond it, and ends after finitely many rounds; it needs
    a handful, because few pixels reach the end of their room.

    Args:
        x: (B, …) points in [0, 1].
        w: (B, …) normals.
        value: (B,) value of the affine function at x.
        norm: linf or l2.

    Returns:
        (B, …) moves.
    """
    direction = -w.sign() * geometry.per_example(value.sign(), w)
    room = torch.where(direction > 0, 1 - x, torch.where(direction < 0, x, torch.zeros_like(x)))
    weight = w.abs()
    pace = torch.ones_like(weight) if norm == "linf" else weight
    gain_at = weight * pace
    gap = value.abs()
    scale = torch.zeros_like(value)
    axes = tuple(range(1, x.dim()))
    for _ in range(ROUNDS.get(x.device.type, 12)):
        wanted = geometry.per_example(scale, x) * pace
        free = wanted < room
        gain = (weight * torch.minimum(wanted, room)).sum(dim=axes)
        slope = (gain_at * free).sum(dim=axes)
        more = torch.where(slope > 0, (gap - gain).clamp_min(0) / slope.clamp_min(1e-30), torch.zeros_like(gap))
        scale = scale + more
        if x.device.type == "cpu" and bool((more <= 1e-7 * scale).all()):
            break
    return direction * torch.minimum(geometry.per_example(scale, x) * pace, room)
