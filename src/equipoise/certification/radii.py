"""From votes to bounds on class probabilities to ℓ2 radii, of a smoothed classifier alone (alpha =
1) or in a mixture.

Bounds and radii are on the safe side: computed in double precision and reduced by more than their
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, betaincinv, ndtr, ndtri

from equipoise.certification.certificate import SmoothingPlan
from equipoise.core import checks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Far above the error of the inverse incomplete beta function, far below any visible difference in a
# radius.
SLACK = 1e-12
# In units of sigma; the normal quantile is good to about 1e-15, a bound on p to 1e-12 (1e-8 after
# the quantile).
_QUANTILE_SLACK = 1e-9
_HALVINGS = 60
SMALLEST_UNIFORM = 0.2  # of a randomised bound
_LARGEST_QUANTILE = 37.0


def lower_bound(successes: ArrayLike, n: ArrayLike, failure: ArrayLike) -> Floats:
    """One-sided Clopper-Pearson bound: exceeds the true probability with probability at most
    `failure`.

    Shapes broadcast; `successes` may be fractional, to predict the bound that such a share would
    give.
    """
    k, total, level = np.broadcast_arrays(
        *(np.asarray(values, np.float64) for values in (successes, n, failure))
    )
    checks.require(bool((total >= 1).all()), "n", "be at least 1", total.min(initial=1))
    checks.require(
        bool(((k >= 0) & (k <= total)).all()),
        "votes",
        "lie between 0 and the number of samples",
        f"{k.min(initial=0):g} to {k.max(initial=0):g}",
    )
    checks.require(
        bool(((level > 0) & (level < 1)).all()), "failure", "lie in (0, 1)", level.min(initial=0)
    )
    with np.errstate(invalid="ignore"):
        bound = betaincinv(k, total - k + 1, level)
    return np.where(k > 0, np.maximum(bound - SLACK, 0.0), 0.0)


def randomized_lower_bound(
    successes: ArrayLike, n: ArrayLike, failure: ArrayLike, uniform: ArrayLike
) -> Floats:
    """Randomised Clopper-Pearson bound [Stevens1950]: never below :func:`lower_bound`, wrong as
    often as allowed.

    It solves u·P(X ≥ k) + (1 − u)·P(X ≥ k + 1) = failure for p, where u is `uniform` in [0, 1] and
    independent of the successes k; at u = 1 it is Clopper and Pearson's. Small u are raised, which
    lowers the bound, because after successes alone it would approach 1 as u approaches `failure`.
    """
    k, total, level, u = np.broadcast_arrays(
        *(np.asarray(v, np.float64) for v in (successes, n, failure, uniform))
    )
    u = np.clip(u, np.clip(2 * level, SMALLEST_UNIFORM, 1), 1)
    low = lower_bound(k, total, level)
    high = np.where(k < total, lower_bound(np.minimum(k + 1, total), total, level) + 2 * SLACK, 1.0)
    for _ in range(_HALVINGS // 2):  # `low` is on the safe side from the start
        middle = (low + high) / 2
        tail = u * betainc(np.maximum(k, 1), total - k + 1, middle)
        tail = tail + (1 - u) * np.where(
            k < total, betainc(k + 1, np.maximum(total - k, 1), middle), 0.0
        )
        low, high = np.where(tail <= level, middle, low), np.where(tail <= level, high, middle)
    return np.where(k > 0, np.maximum(low - SLACK, 0.0), 0.0)


def upper_bound(successes: ArrayLike, n: ArrayLike, failure: ArrayLike) -> Floats:
    """One-sided bound from above: falls below the true probability with probability at most
    `failure`."""
    return 1 - lower_bound(np.asarray(n) - np.asarray(successes), n, failure)


LowerBound = Callable[[ArrayLike, ArrayLike, ArrayLike], Floats]  # from successes, n and failure


def two_sided_bounds(
    votes: ArrayLike,
    top: ArrayLike,
    n: ArrayLike,
    failure: ArrayLike,
    lower: LowerBound = lower_bound,
) -> tuple[Floats, Floats]:
    """Lower bound of the top class and upper bound of the best other class, half of `failure` each.

    No union over the other classes is needed: the claim that *all* of them lie below the largest
    bound is wrong only if the bound of the one truly largest class fails (`docs/guarantees.md`).
    The votes (B, K) of every image sum to n, and `top` (B,) was selected on other samples.
    """
    counts = np.asarray(votes, dtype=np.float64)
    total, level = np.broadcast_to(n, counts.shape[:1]), np.broadcast_to(failure, counts.shape[:1])
    check_votes(counts, total)
    rows = np.arange(len(counts))
    own = lower(counts[rows, np.asarray(top)], total, level / 2)
    best = 1 - lower(total - counts[rows, runner_up(counts, top)], total, level / 2)
    return own, np.minimum(best, 1 - own)


def runner_up(votes: Floats, top: ArrayLike) -> Ints:
    """(B,) the class with the most votes (B, K) besides `top` (B,)."""
    others = votes.copy()
    others[np.arange(len(votes)), np.asarray(top)] = -1
    return np.asarray(others.argmax(axis=1))


def check_votes(votes: Floats, n: Floats) -> None:
    """Check that the votes of every image sum to its number of samples."""
    off = np.abs(votes.sum(axis=1) - n) > 1e-6 * np.maximum(n, 1)
    checks.require(
        not off.any(),
        "votes",
        "sum to the number of samples",
        f"{votes[off].sum(axis=1)[:1]} for {n[off][:1]}" if off.any() else None,
    )


def needed_probability(alpha: float) -> float:
    """1 / (2·alpha): above it, a probability of the smoothed side outweighs any accurate
    classifier."""
    checks.require(0.5 <= alpha <= 1, "alpha", "lie in [0.5, 1] for a certificate", alpha)
    return 1 / (2 * alpha)


def lemma_margin(alpha: float) -> float:
    """(1 − alpha) / alpha: no accurate classifier overcomes a larger margin of the robust side
    [Bai2024, Lemma 3.2].

    With a margin of exactly this, an accurate classifier that is certain of the runner-up makes a
    tie.
    """
    needed_probability(alpha)
    return (1 - alpha) / alpha


def one_sided(p: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    r"""The radius from a lower bound on the probability of the top class alone.

    .. math:: \sigma \left(\Phi^{-1}(p) - \Phi^{-1}\!\left(\tfrac{1}{2\alpha}\right)\right)

    At alpha = 1 this is the radius of [Cohen2019]; the mixture's is proved in `docs/guarantees.md`
    and never smaller than that of [Bai2024, Theorem A.2]. Zero where it would be negative.

    >>> float(one_sided(0.99, 1.0, 0.79).round(2))
    1.99
    """
    needed = needed_probability(alpha)
    # Near 1 a quantile magnifies the last digit, so that of a rounded quotient is raised.
    return _round_down(
        _quantile(p) - _quantile(needed if alpha in (0.5, 1) else np.nextafter(needed, 1)), sigma
    )


def two_sided(p: ArrayLike, q: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    r"""The radius from a lower bound p on the top class and an upper bound q on every other class.

    The largest r with :math:`\Phi(\Phi^{-1}(p) - r/\sigma) - \Phi(\Phi^{-1}(q) + r/\sigma) \ge
    (1-\alpha)/\alpha`, by bisection from below; at alpha = 1 it is σ/2·(Φ⁻¹(p) − Φ⁻¹(q))
    [Cohen2019].
    """
    own, other = np.broadcast_arrays(_quantile(p), _quantile(q))
    if alpha == 1:
        return _round_down((own - other) / 2, sigma)
    margin = lemma_margin(alpha) + SLACK
    low, high = np.zeros_like(own), np.maximum((own - other) / 2, 0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        kept = ndtr(own - middle) - ndtr(other + middle) >= margin
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    return _round_down(low, sigma)


def theorem_a2(p: ArrayLike, q: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    """σ/2·(Φ⁻¹(α·p) − Φ⁻¹(α·q + 1 − α)) [Bai2024, Theorem A.2], for comparison."""
    needed_probability(alpha)
    # 1 − alpha is exact
    own, other = alpha * _probability(p), alpha * _probability(q) + (1 - alpha)
    if alpha != 1:  # near 1 a quantile magnifies the last digit of a probability
        own, other = np.nextafter(own, 0), np.nextafter(other, 2)
    return _round_down((_quantile(own) - _quantile(np.minimum(other, 1))) / 2, sigma)


# Lipschitz constants of a smoothed probability times sigma: the smallest valid one, and that of
# [Bai2024].
SHARP_CONSTANT, PAPER_CONSTANT = 1 / math.sqrt(2 * math.pi), math.sqrt(2 / math.pi)


def theorem_3_5(
    p: ArrayLike,
    sigma: float,
    alpha: float = 1.0,
    q: ArrayLike | None = None,
    *,
    constant: float = PAPER_CONSTANT,
) -> Floats:
    """(p − q − (1 − α)/α) / (2·L) with L = constant/σ, and q = 1 − p if not given [Bai2024, Theorem
    3.5]."""
    own = _probability(p)
    other = 1 - own if q is None else _probability(q)
    return _round_down((own - other - lemma_margin(alpha)) / (2 * constant), sigma)


class ProbabilityBounds(NamedTuple):
    """Bounds that hold together, whatever alpha is; from one side alone, `upper` is 1 − `lower`."""

    lower: Floats  # (B,) of the probability of the top class
    upper: Floats  # (B,) of the probability of every other class

    def at(self, rows: Ints) -> ProbabilityBounds:
        """The bounds of some of the images."""
        return ProbabilityBounds(self.lower[rows], self.upper[rows])

    def tighten(self, rows: Ints, other: ProbabilityBounds) -> None:
        """Keep the better bound on either side, in place, for the images at `rows`."""
        self.lower[rows] = np.maximum(self.lower[rows], other.lower)
        self.upper[rows] = np.minimum(self.upper[rows], other.upper)


@dataclass(frozen=True)
class VoteRule:
    """Computes bounds of class probabilities from votes, and a radius from the bounds."""

    plan: SmoothingPlan
    probability_error: float = 0.0  # how far the sampler's own error may shift any probability

    def bounds(
        self,
        votes: Floats,
        n: Floats,
        top: ArrayLike,
        failure: ArrayLike,
        uniform: Floats | None = None,
    ) -> ProbabilityBounds:
        """(B, K) votes → bounds; wrong with probability `failure`.

        With `uniform` (B,), independent of the votes, they are randomised.
        """
        lower = lower_bound if uniform is None else partial(randomized_lower_bound, uniform=uniform)
        if self.plan.two_sided:
            p, q = two_sided_bounds(votes, top, n, failure, lower)
            p, q = (
                np.maximum(p - self.probability_error, 0),
                np.minimum(q + self.probability_error, 1),
            )
            return ProbabilityBounds(p, q)
        check_votes(votes, n)
        own = votes[np.arange(len(votes)), np.asarray(top)]
        p = np.maximum(lower(own, n, failure) - self.probability_error, 0)
        return ProbabilityBounds(p, 1 - p)

    def predicted_bounds(
        self, votes: Floats, n: Floats, top: ArrayLike, failure: ArrayLike
    ) -> ProbabilityBounds:
        """The bounds that such votes would give: a randomised one is worth half a vote, or twice
        the failure."""
        if self.plan.randomized:
            rows, own, other = np.arange(len(votes)), np.asarray(top), runner_up(votes, top)
            half = np.minimum(votes[rows, other], 0.5)
            votes = votes.copy()
            votes[rows, own], votes[rows, other] = (
                votes[rows, own] + half,
                votes[rows, other] - half,
            )
            failure = np.minimum(np.where(half == 0, 2, 1) * failure, 0.5)
        return self.bounds(votes, n, top, failure)

    def radius(self, bounds: ProbabilityBounds) -> Floats:
        """(B,) radius from bounds, at the alpha of the plan."""
        if self.plan.two_sided:
            return two_sided(*bounds, self.plan.sigma, self.plan.alpha)
        return one_sided(bounds.lower, self.plan.sigma, self.plan.alpha)

    def largest_radius(
        self, votes: Floats, n: Floats, top: ArrayLike, failure: ArrayLike
    ) -> Floats:
        """(B,) upper bound of any radius that more samples could certify; wrong with probability
        about `failure`."""
        rows = np.arange(len(votes))
        own = upper_bound(votes[rows, np.asarray(top)], n, failure)
        if not self.plan.two_sided:
            return one_sided(own, self.plan.sigma, self.plan.alpha)
        other = lower_bound(votes[rows, runner_up(votes, top)], n, failure)
        return two_sided(own, other, self.plan.sigma, self.plan.alpha)


def _probability(p: ArrayLike) -> Floats:
    array = np.asarray(p, dtype=np.float64)
    checks.require(bool(((array >= 0) & (array <= 1)).all()), "probability", "lie in [0, 1]", p)
    return array


def _quantile(p: ArrayLike) -> Floats:
    """Φ⁻¹, kept finite: beyond ±37 a double has no probability between 0 and 1."""
    return np.asarray(np.clip(ndtri(_probability(p)), -_LARGEST_QUANTILE, _LARGEST_QUANTILE))


def _round_down(in_sigmas: Floats, sigma: float) -> Floats:
    checks.positive("sigma", sigma)
    return np.maximum(sigma * (in_sigmas - _QUANTILE_SLACK * np.maximum(1, np.abs(in_sigmas))), 0.0)
