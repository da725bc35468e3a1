"""Conformal risk control: how many images may be lost so that a promise made on n images holds for the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks


@dataclass(frozen=True)
class Target:
    """The loss a fit may cause: a share of all images, or with `of_robust` of those on which the robust model survives.

    `lose_at_most` points of robust accuracy are a share of all images; 1 − β is a share of the robust ones.
    """

    share: float
    of_robust: bool = False

    def __post_init__(self) -> None:
        checks.within("beta" if self.of_robust else "lose_at_most", self.share, 0, 1)

    def __str__(self) -> str:
        if self.of_robust:
            return f"{100 * self.share:.3g} % of the robust model's robust accuracy"
        points = f"{100 * self.share:.3g}"
        return f"{points} point{'' if points == '1' else 's'} of robust accuracy"

    def allowed(self, images: int, robust: int) -> int:
        """How many of the calibration images may be lost; −1 if there are too few to promise anything."""
        return allowed_losses(self.share, robust if self.of_robust else images)


def lose_at_most(points: float) -> Target:
    """Target in points (of 100) of robust accuracy."""
    checks.within("lose_at_most", points, 0, 100)
    return Target(points / 100)


def beta(value: float) -> Target:
    """Target as the share β of the robust model's attacked accuracy to keep [Bai2024nuts, Eq. (3)]."""
    checks.within("beta", value, 0, 1)
    return Target(1 - value, of_robust=True)


def allowed_losses(share: float, n: int) -> int:
    """The largest m with (m + 1)/(n + 1) ≤ share: conformal risk control [Angelopoulos2022, Thm. 1].

    The loss of an image is 0 or 1 and does not decrease in the threshold. If the threshold loses at most m of n
    images, the next image of the same distribution is lost with probability at most `share`. The uncorrected rule
    m ≤ share·n breaks its promise almost half the time.

    >>> allowed_losses(0.02, 500), allowed_losses(0.001, 500)
    (9, -1)
    """
    return math.floor(share * (n + 1) - 1 + 1e-9)


def threshold(margins: Tensor, losses: int) -> Tensor:
    """The threshold q at or below which exactly this many of the margins (…, n) lie (fewer if they tie).

    q lies half way between two margins, so that rounding cannot change the count, and never above the lower order
    statistic, where interpolation would break the constraint.
    """
    n = margins.shape[-1]
    if losses < 0 or n == 0:
        return margins.new_zeros(margins.shape[:-1])
    if losses >= n:
        return margins.new_ones(margins.shape[:-1])
    smallest = margins.topk(losses + 1, dim=-1, largest=False).values
    above = smallest[..., losses].clamp_max(1.0)
    # Where margins tie, the threshold stays below all of them.
    below = torch.where(smallest < above.unsqueeze(-1), smallest, 0.0).amax(dim=-1)
    return (below + above) / 2
