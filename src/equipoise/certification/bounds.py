"""From counts to probabilities that are wrong as rarely as promised; arrays in, arrays out, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from equipoise.core import checks

Floats = NDArray[np.float64]
# Far above the error of the inverse incomplete beta function, far below any difference in a radius.
SLACK = 1e-12


def lower(successes: ArrayLike, n: ArrayLike, failure: ArrayLike) -> Floats:
    """One-sided Clopper-Pearson bound: exceeds the true probability with probability at most `failure`.

    Shapes broadcast; `successes` may be fractional (the bound then tells what such a share would give).
    """
    k, total, level = _prepared(successes, n, failure)
    with np.errstate(invalid="ignore"):
        found = betaincinv(k, total - k + 1, level)
    return np.where(k > 0, np.maximum(found - SLACK, 0.0), 0.0)


def upper(successes: ArrayLike, n: ArrayLike, failure: ArrayLike) -> Floats:
    """The bound from above: lies below the true probability with probability at most `failure`."""
    k, total, level = _prepared(successes, n, failure)
    return 1 - lower(total - k, total, level)


def of_counts(counts: ArrayLike, chosen: ArrayLike, n: ArrayLike, failure: ArrayLike) -> tuple[Floats, Floats]:
    """Lower bound of the chosen class and upper bound of the best other class, half of `failure` each.

    No union over the other classes is needed: whoever claims that *all* of them lie below the larger
    bound is only wrong if the bound of the one truly largest class fails (`docs/guarantees.md`).

    Args:
        counts: (B, K) votes.
        chosen: (B,) class, chosen on other samples.
        n: (B,) or () samples; every row of `counts` sums to it.
        failure: (B,) or () probability with which either bound may be wrong.
    """
    votes = np.asarray(counts, dtype=np.float64)
    total, level = np.broadcast_to(n, votes.shape[:1]), np.broadcast_to(failure, votes.shape[:1])
    matching(votes, total)
    rows = np.arange(len(votes))
    own = lower(votes[rows, np.asarray(chosen)], total, level / 2)
    others = votes.copy()
    others[rows, np.asarray(chosen)] = -1
    best = upper(np.maximum(others.max(axis=1), 0), total, level / 2)
    return own, np.minimum(best, 1 - own)


def matching(counts: Floats, n: NDArray[Any]) -> None:
    """Votes that do not sum to the number of samples are somebody's mistake."""
    off = np.abs(counts.sum(axis=1) - n) > 1e-6 * np.maximum(n, 1)
    checks.require(not off.any(), "counts", "sum to the number of samples",
                   f"{counts[off].sum(axis=1)[:1]} for {n[off][:1]}" if off.any() else None)


def _prepared(successes: ArrayLike, n: ArrayLike, failure: ArrayLike) -> tuple[Floats, Floats, Floats]:
    k, total, level = np.broadcast_arrays(np.asarray(successes, np.float64), np.asarray(n, np.float64),
                                          np.asarray(failure, np.float64))
    checks.require(bool((total >= 1).all()), "n", "be at least 1", total.min(initial=1))
    checks.require(bool(((k >= 0) & (k <= total)).all()), "counts", "lie between 0 and the number of samples",
                   f"{k.min(initial=0):g} to {k.max(initial=0):g}")
    checks.require(bool(((level > 0) & (level < 1)).all()), "failure", "lie in (0, 1)", level.min(initial=0))
    return k, total, level
