"""Tests of whether one class is more probable than another by a margin, from their votes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, ndtri, xlog1py, xlogy

from equipoise.certification.radii import SLACK, Floats, lower_bound, upper_bound

_CELLS = 40  # of the interval of the nuisance parameter
_INTERVAL_SHARE = 0.1  # of the failure probability, for that interval
_DEVIATIONS = 8  # counts further from their mean are not summed up
# Of the failure probability, for cases that bounds decide; the exact test has the rest
_CLEAR_SHARE = 0.01
_HOPELESS = 0.3  # standard deviations short of significance, below which the exact test is not worth its time


def exceeds(
    votes: Floats, other: Floats, n: Floats, margin: Floats, failure: Floats
) -> NDArray[np.bool_]:
    """(B,) whether a class is certainly more probable than another plus `margin`; wrong with
    probability `failure`.

    Where bounds of both classes decide it, they do; where it is close, the exact test does. Both
    could err, so they share the failure probability.

    Args:
        votes, other: (B,) votes of the two classes.
        n: (B,) all votes.
        margin: (B,) in [-1, 1].
        failure: (B,) probability with which a true "no" is a "yes".
    """
    clear, failure = _CLEAR_SHARE * failure, (1 - _CLEAR_SHARE) * failure
    decided = lower_bound(votes, n, clear / 2) > upper_bound(other, n, clear / 2) + margin
    share, gap = (votes + other) / n, (votes - other) / n
    score = (gap - margin) / np.sqrt(np.maximum(share - gap**2, 1 / n) / n)
    for row in (~decided & (score > -ndtri(failure) - _HOPELESS)).nonzero()[0]:
        level = float(failure[row])
        decided[row] = (
            p_value(int(votes[row]), int(other[row]), int(n[row]), float(margin[row]), level)
            <= level
        )
    return np.asarray(decided)


@lru_cache(maxsize=1 << 16)
def p_value(votes: int, other: int, n: int, margin: float, failure: float) -> float:
    """An upper bound of the p-value of "p ≤ q + margin", by the difference of the votes
    [BergerBoos1994].

    At p = q + margin the difference still depends on s = p + q. The p-value is the largest over an
    interval that holds s but for a part of `failure`, plus that part. In each of its cells the
    probability is bounded by that of the largest p with the smallest q, which may only make a
    difference as large more probable.
    """
    part = _INTERVAL_SHARE * failure
    low = max(float(lower_bound(votes + other, n, part / 2)), abs(margin))
    high = float(upper_bound(votes + other, n, part / 2))
    # s < |margin|: then p − q < margin if that is positive, and p − q > margin if not
    if low > high:
        return 1.0 if margin > 0 else part
    edges = np.linspace(low, high, _CELLS + 1)
    p, q = np.clip((edges[1:] + margin) / 2, 0, 1), np.clip((edges[:-1] - margin) / 2, 0, 1)
    return part + float(_tail(votes - other, n, p, q).max())


def _tail(difference: int, n: int, p: Floats, q: Floats) -> Floats:
    """P(X − Y ≥ difference) for votes X, Y of classes with probabilities p, q; rare Y are counted
    as if it held."""
    width = _DEVIATIONS * np.sqrt(n * q.max()) + _DEVIATIONS
    y = np.arange(max(np.floor(n * q.min() - width), 0), min(np.ceil(n * q.max() + width), n) + 1)[
        None
    ]
    p, q = p[:, None], q[:, None]
    log_choose = gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)
    weight = np.exp(log_choose + xlogy(y, q) + xlog1py(n - y, -q))
    needed, rest = difference + y, n - y
    # P(Bin(rest, p / (1 − q)) ≥ needed): 1 where nothing is needed, 0 where too much is.
    share = np.minimum(p / np.maximum(1 - q, 1e-300), 1.0)
    above = betainc(
        np.clip(needed, 1, np.maximum(rest, 1)), np.maximum(rest - needed, 0) + 1, share
    )
    above = np.where(needed <= 0, 1.0, np.where(needed > rest, 0.0, above))
    return np.asarray((weight * above).sum(axis=1) + np.maximum(1 - weight.sum(axis=1), 0) + SLACK)
