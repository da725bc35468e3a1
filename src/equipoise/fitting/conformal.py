"""How many images may be lost, so that a promise made on n images holds for the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks


@dataclass(frozen=True)
class Target:
    """What may be lost: a share of all images, or with `of_robust` of those that the robust model keeps.

    `lose_at_most` points of robust accuracy are a share of all images; 1 − beta is a share of the robust ones.
    """

    share: float
    of_robust: bool = False

    def __post_init__(self) -> None:
        checks.within("beta" if self.of_robust else "lose_at_most", self.share, 0, 1)

    def __str__(self) -> str:
        if self.of_robust:
            return f"{100 * self.share:.3g} % of the images that the robust model keeps"
        points = f"{100 * self.share:.3g}"
        return f"{points} point{'' if points == '1' else 's'} of robust accuracy"

    def allowed(self, images: int, robust: int) -> int:
        """How many of the calibration images may be lost; −1 if there are too few to promise anything."""
        return allowed(self.share, robust if self.of_robust else images)


def lose_at_most(points: float) -> Target:
    """So many points (of 100) of robust accuracy."""
    checks.within("lose_at_most", points, 0, 100)
    return Target(points / 100)


def beta(value: float) -> Target:
    """The share of the robust model's attacked accuracy that is kept [Bai2024nuts, Eq. (3)]."""
    checks.within("beta", value, 0, 1)
    return Target(1 - value, of_robust=True)


def allowed(share: float, n: int) -> int:
    """The largest m with (m + 1)/(n + 1) ≤ share: conformal risk control [Angelopoulos2022, Thm. 1].

    Losing an image is a loss in {0, 1} that can only come when the threshold rises. If the threshold loses
    at most m of n images, the next image, drawn like them, is lost with probability at most `share`. The
    plain rule m ≤ share·n would break its promise almost half the time.

    >>> allowed(0.02, 500), allowed(0.001, 500)
    (9, -1)
    """
    return math.floor(share * (n + 1) - 1 + 1e-9)


def threshold(margins: Tensor, lost: int) -> Tensor:
    """The threshold q that loses exactly `lost` of the margins (or fewer if they tie); 0 loses none.

    Args:
        margins: (…, n) in any order; one at or below q is lost.
        lost: how many may be lost, −1 for none.

    Half way between two margins, so that no margin ties with it and rounding changes nothing; never above
    the lower of the order statistics, where interpolation between them would break the constraint.
    """
    n = margins.shape[-1]
    if lost < 0 or n == 0:
        return margins.new_zeros(margins.shape[:-1])
    if lost >= n:
        return margins.new_ones(margins.shape[:-1])
    ordered = margins.topk(lost + 1, dim=-1, largest=False).values
    above = ordered[..., lost].clamp_max(1.0)
    # Where margins tie, the threshold stays below all of them.
    below = torch.where(ordered < above.unsqueeze(-1), ordered, 0.0).amax(dim=-1)
    return (below + above) / 2
