"""From probability bounds to ℓ2 radii, for a smoothed classifier alone (alpha = 1) and inside a mixture.

Every radius is rounded down: computed in double precision and lowered by more than its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from equipoise.certification import bounds
from equipoise.certification.bounds import Floats
from equipoise.certification.plan import SmoothingPlan
from equipoise.core import checks

# In units of sigma; the normal quantile is good to about 1e-15, a bound on p to 1e-12 (1e-8 after the quantile).
SLACK = 1e-9
_HALVINGS = 60
_FAR = 37.0


def needed_probability(alpha: float) -> float:
    """1 / (2·alpha): above it, a probability of the smoothed side outweighs any accurate classifier."""
    checks.require(0.5 <= alpha <= 1, "alpha", "lie in [0.5, 1] for a certificate", alpha)
    return 1 / (2 * alpha)


def one_sided(p: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    r"""The radius from a lower bound on the probability of the top class alone.

    .. math:: \sigma \left(\Phi^{-1}(p) - \Phi^{-1}\!\left(\tfrac{1}{2\alpha}\right)\right)

    At alpha = 1 this is the radius of [Cohen2019]; the mixture's is proved in `docs/guarantees.md` and never
    smaller than that of [Bai2024, Theorem A.2]. Zero where it would be negative.

    >>> float(one_sided(0.99, 1.0, 0.79).round(2))
    1.99
    """
    return _down(_quantile(p) - _quantile(needed_probability(alpha)), sigma)


def two_sided(p: ArrayLike, q: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    r"""The radius from a lower bound p on the top class and an upper bound q on every other class.

    The largest r with :math:`\Phi(\Phi^{-1}(p) - r/\sigma) - \Phi(\Phi^{-1}(q) + r/\sigma) \ge (1-\alpha)/\alpha`,
    found by bisection from below; at alpha = 1 it is σ/2·(Φ⁻¹(p) − Φ⁻¹(q)) [Cohen2019].
    """
    own, other = np.broadcast_arrays(_quantile(p), _quantile(q))
    if alpha == 1:
        return _down((own - other) / 2, sigma)
    margin = lemma_margin(alpha) + bounds.SLACK
    low, high = np.zeros_like(own), np.maximum((own - other) / 2, 0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        kept = ndtr(own - middle) - ndtr(other + middle) >= margin
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    return _down(low, sigma)


def paper(p: ArrayLike, q: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    """σ/2·(Φ⁻¹(α·p) − Φ⁻¹(α·q + 1 − α)) [Bai2024, Theorem A.2], shown beside ours."""
    needed_probability(alpha)
    other = np.minimum(alpha * _probability(q) + 1 - alpha, 1)
    return _down((_quantile(alpha * _probability(p)) - _quantile(other)) / 2, sigma)


def lipschitz(p: ArrayLike, sigma: float, alpha: float = 1.0) -> Floats:
    """(2·p − 1/α) / (2·L) with L = √(2/(π·σ²)), from p alone [Bai2024, Theorem 3.5], shown beside ours."""
    needed_probability(alpha)
    return _down((2 * _probability(p) - 1 / alpha) / 2 * math.sqrt(math.pi / 2), sigma)


def lemma_margin(alpha: float) -> float:
    """(1 − alpha) / alpha: a margin of the robust side that no accurate classifier overcomes [Bai2024, Lemma 3.2]."""
    needed_probability(alpha)
    return (1 - alpha) / alpha


@dataclass(frozen=True)
class Rule:
    """How votes become a bound and a radius."""

    sigma: float
    alpha: float = 1.0
    two_sided: bool = False
    slack: float = 0.0  # probability lost to a sampler that is not exact

    @staticmethod
    def of(plan: SmoothingPlan, slack: float = 0.0) -> Rule:
        """The rule that a plan asks for."""
        return Rule(plan.sigma, plan.alpha, plan.two_sided, slack)

    def __call__(self, votes: Floats, n: Floats, chosen: ArrayLike, failure: ArrayLike) -> tuple[Floats, Floats]:
        """(B, K) votes → (B,) lower bound of the chosen class, (B,) radius; wrong with probability `failure`."""
        if self.two_sided:
            p, q = bounds.of_counts(votes, chosen, n, failure)
            p, q = np.maximum(p - self.slack, 0), np.minimum(q + self.slack, 1)
            return p, two_sided(p, q, self.sigma, self.alpha)
        bounds.matching(votes, n)
        own = votes[np.arange(len(votes)), np.asarray(chosen)]
        p = np.maximum(bounds.lower(own, n, failure) - self.slack, 0)
        return p, one_sided(p, self.sigma, self.alpha)

    def optimistic(self, votes: Floats, n: Floats, chosen: ArrayLike, failure: ArrayLike) -> Floats:
        """(B,) what the radius could at most be: the true probability exceeds its upper bound that rarely."""
        own = bounds.upper(votes[np.arange(len(votes)), np.asarray(chosen)], n, failure)
        if not self.two_sided:
            return one_sided(own, self.sigma, self.alpha)
        others = votes.copy()
        others[np.arange(len(votes)), np.asarray(chosen)] = 0
        return two_sided(own, bounds.lower(others.max(axis=1), n, failure), self.sigma, self.alpha)


def _probability(p: ArrayLike) -> Floats:
    array = np.asarray(p, dtype=np.float64)
    inside = bool(((array >= 0) & (array <= 1)).all())
    checks.require(inside, "probability", "lie in [0, 1]", p)
    return array


def _quantile(p: ArrayLike) -> Floats:
    """Φ⁻¹, kept finite: beyond ±37 a double has no probability between 0 and 1 any more."""
    return np.asarray(np.clip(ndtri(_probability(p)), -_FAR, _FAR))


def _down(in_sigmas: Floats, sigma: float) -> Floats:
    checks.positive("sigma", sigma)
    return np.maximum(sigma * (in_sigmas - SLACK * np.maximum(1, np.abs(in_sigmas))), 0.0)
