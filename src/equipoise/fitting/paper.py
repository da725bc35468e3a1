"""MixedNUTS: Algorithm 1 of the paper on cached logits, without the corrections of the other rules
[Bai2024nuts].

The grid, the margins, the percentile and the objective are those of the paper and its published
code; no model is run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.arrays import Array
from equipoise.core.device import single_thread
from equipoise.mixing import LogitMap
from equipoise.mixing.logit_maps import CLAMPS, layer_norm, power
from equipoise.mixing.mixednuts import RELEASED, ReleasedNumbers

STEPS = 8  # values of s, of p and of c
# The objective counts margins from here on at the latest, as in the published code
BELOW_ONE = 1 - 1e-9
Axes = tuple[Array, Array, Array]  # values of s, of p and of c


@dataclass(frozen=True)
class PublishedSettings:
    """The search box [Bai2024nuts, Table 3], β, the released optimum, and the β of α_d for one data
    set."""

    classes: int
    s: tuple[float, float]
    p: tuple[float, float]
    c: tuple[float, float]
    released: ReleasedNumbers
    surrogate_beta: float  # the β that gave α_d
    beta: float = 0.985
    saturation: float = 3e-6  # thresholds as near to 1 as this are numerically doubtful

    @property
    def optimum(self) -> tuple[float, float, float]:
        """The released s, p, c."""
        return self.released.s, self.released.p, self.released.c

    @property
    def alpha(self) -> float:
        """The released alpha."""
        return self.released.alpha

    @property
    def surrogate_alpha(self) -> float:
        """The released α_d."""
        return self.released.surrogate_alpha

    def axes(self) -> Axes:
        """Eight values each: of s on a logarithmic scale, of p and c on a linear one."""
        s = np.logspace(np.log10(self.s[0]), np.log10(self.s[1]), STEPS)
        return s, np.linspace(*self.p, STEPS), np.linspace(*self.c, STEPS)

    def logit_map(self) -> LogitMap:
        """The map of the released optimum."""
        return self.released.logit_map()


PUBLISHED = {
    "cifar10": PublishedSettings(
        10, (0.05, 5.0), (1.0, 4.0), (-1.1, 0.0), RELEASED["cifar10"], 0.95
    ),
    "cifar100": PublishedSettings(
        100, (0.05, 4.0), (1.0, 4.0), (-2.5, -0.4), RELEASED["cifar100"], 0.935
    ),
    "imagenet": PublishedSettings(
        1000, (0.01, 0.2), (2.0, 3.0), (-2.0, 0.0), RELEASED["imagenet"], 0.95, 0.99, 1e-7
    ),
}


def published_for(classes: int) -> str:
    """The data set of the paper whose number of classes is nearest to this one, by their ratio.

    >>> [published_for(classes) for classes in (10, 43, 100, 1000)]
    ['cifar10', 'cifar100', 'cifar100', 'imagenet']
    """
    checks.require(
        classes > 2,
        "rule",
        "not be paper with two classes, whose logits its layer norm makes ±0.71",
        "paper",
    )
    return min(PUBLISHED, key=lambda name: abs(math.log(PUBLISHED[name].classes / classes)))


@dataclass(frozen=True, eq=False)
class GridSearch:
    """Thresholds and objectives of all candidates; arrays are (S, C, P), the order of the published
    code."""

    axes: Axes
    q: Array  # (S, C, P) thresholds (1 − α)/α
    # (S, C, P) share of the clean errors that the robust model decides; lower is better
    objective: Array
    saturation: float = 3e-6

    @property
    def optima(self) -> list[tuple[int, int, int]]:
        """All candidates with the lowest objective, in the order of the published code, which
        prints all of them."""
        return [
            (int(s), int(c), int(p))
            for s, c, p in np.argwhere(self.objective == self.objective.min())
        ]

    @property
    def best(self) -> tuple[int, int, int]:
        """The optimum to use.

        The published code asks for one that is numerically stable, whose 1 − α is not tiny. So, of
        several: one whose threshold is not saturated, with the largest 1 − α, and of these the
        first in the order of s, then c, then p.
        """
        return max(
            self.optima, key=lambda place: (self.q[place] < 1 - self.saturation, self.q[place])
        )

    @property
    def candidate(self) -> tuple[float, float, float]:
        """s, p and c of the optimum."""
        (s, c, p), axes = self.best, self.axes
        return float(axes[0][s]), float(axes[1][p]), float(axes[2][c])

    @property
    def alpha(self) -> float:
        """α of the optimum."""
        return 1 / (1 + float(self.q[self.best]))

    def edges(self) -> list[str]:
        """The edges of the grid on which the optimum lies, such as "s high"."""
        s, c, p = self.best
        places = zip("spc", (s, p, c), self.axes, strict=True)
        return [
            f"{name} {'low' if place == 0 else 'high'}"
            for name, place, axis in places
            if len(axis) > 1 and place in (0, len(axis) - 1)
        ]


@single_thread()
def algorithm_1(
    attacked: Tensor,
    clean: Tensor,
    beta: float,
    axes: Axes,
    clamp: str = "gelu",
    saturation: float = 3e-6,
) -> GridSearch:
    """The grid search of Algorithm 1, in double precision.

    Args:
        attacked: (R, K) logits of h at the attacked points that it classifies correctly.
        clean: (M, K) logits of h on the clean images that it misclassifies; for the conditional
            objective only on those that g classifies correctly [Bai2024nuts, D.8.3].
        beta: share of the attacked points that the robust model is to decide.
        axes: values of s, p and c.
        clamp: a key of `CLAMPS`.
        saturation: see :class:`PublishedSettings`.
    """
    checks.require(
        len(attacked) > 0, "attacked", "hold a point that the robust model classifies correctly", 0
    )
    checks.require(len(clean) > 0, "clean", "hold an image that the robust model misclassifies", 0)
    normed = [layer_norm(z.double()) for z in (attacked, clean)]
    scales, powers, shifts = axes
    q, objective = np.empty((2, len(scales), len(shifts), len(powers)))
    for k, c in enumerate(shifts):
        clamped = [CLAMPS[clamp](z + c) for z in normed]
        for j, p in enumerate(powers):
            powered = [power(u, float(p)) for u in clamped]
            for i, s in enumerate(scales):
                kept, errors = (top_margins(s * v) for v in powered)
                q[i, k, j] = percentile(kept, beta)
                objective[i, k, j] = errors_kept(errors, q[i, k, j])
    return GridSearch(axes, q, objective, saturation)


def top_margins(z: Tensor) -> Array:
    """(B,) the largest probability minus the second largest [Bai2024nuts, Definition 2.1]; z are
    (B, K) logits."""
    top = torch.softmax(z.double(), dim=1).topk(2, dim=1).values
    margins: Array = (top[:, 0] - top[:, 1]).cpu().numpy()
    return margins


def percentile(margins: Array, beta: float) -> float:
    """The (1 − β)-quantile with linear interpolation, as in the published code."""
    return float(np.percentile(margins, 100 - 100 * beta))


def errors_kept(margins: Array, q: float) -> float:
    """The objective: the share of clean errors whose margin reaches the threshold, so that the
    robust model decides."""
    return float(np.mean(margins >= min(q, BELOW_ONE)))
