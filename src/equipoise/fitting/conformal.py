"""Targets of a fit, and the threshold that loses so many calibration images; the bounds are in
`core/promises.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.promises import Target as Target


def lose_at_most(points: float, confidence: float | None = None) -> Target:
    """Target in points (of 100) of robust accuracy, in expectation or with `confidence`."""
    checks.within("lose_at_most", points, 0, 100)
    return Target(points / 100, confidence=confidence)


def beta(value: float, confidence: float | None = None) -> Target:
    """Target as the share β of the robust model's attacked accuracy to keep [Bai2024nuts, Eq.
    (3)]."""
    checks.within("beta", value, 0, 1)
    return Target(1 - value, of_robust=True, confidence=confidence)


def threshold(margins: Tensor, losses: int) -> Tensor:
    """The threshold q at or below which exactly this many of the margins (…, n) lie (fewer if they
    tie).

    q lies half way between two margins, so that rounding cannot change the count, and never above
    the lower order statistic, where interpolation would break the constraint.
    """
    return threshold_of_sorted(ascending(margins), losses)


def ascending(margins: Tensor) -> Tensor:
    """The margins (…, n) in ascending order, by numpy, whose sort is faster than torch's."""
    return torch.from_numpy(np.sort(margins.numpy(), axis=-1))


def threshold_of_sorted(margins: Tensor, losses: int) -> Tensor:
    """:func:`threshold` of margins in ascending order; those after the first `losses` + 1 are not
    read."""
    n = margins.shape[-1]
    if losses < 0 or n == 0:
        return margins.new_zeros(margins.shape[:-1])
    if losses >= n:
        return margins.new_ones(margins.shape[:-1])
    smallest = margins[..., : losses + 1]
    above = smallest[..., losses].clamp_max(1.0)
    # Where margins tie, or are so near that half way between them is no number, the threshold stays
    # below all of them.
    distinct = smallest < above.unsqueeze(-1) * (1 - 4 * torch.finfo(margins.dtype).eps)
    below = torch.where(distinct, smallest, 0.0).amax(dim=-1)
    return (below + above) / 2
