"""Intervals: no accuracy leaves the house without one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.special import betaincinv, ndtri, stdtrit

from equipoise import checks


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that covers the truth with the stated confidence."""

    value: float
    low: float
    high: float
    n: int


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Exact two-sided binomial interval: covers at least as often as promised, for every n."""
    _check_counts(successes, n, confidence)
    tail = (1 - confidence) / 2
    low = float(betaincinv(successes, n - successes + 1, tail)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, n - successes, 1 - tail)) if successes < n else 1.0
    return Estimate(successes / n, low, high, n)


def share(flags: Iterable[object]) -> Estimate:
    """How many of these are true, with their exact interval.

    >>> share([True, False, True, True]).value
    0.75
    """
    seen = [bool(flag) for flag in flags]
    return clopper_pearson(sum(seen), len(seen))


def lower_bound(successes: int, n: int, failure: float) -> float:
    """One-sided Clopper-Pearson bound: exceeds the truth with probability at most `failure`."""
    _check_counts(successes, n, 1 - failure)
    return float(betaincinv(successes, n - successes + 1, failure)) if successes > 0 else 0.0


def wilson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Score interval [Wilson1927]: shorter than Clopper-Pearson, right on average over proportions."""
    _check_counts(successes, n, confidence)
    z2 = float(ndtri(0.5 + confidence / 2)) ** 2
    share = successes / n
    centre = (successes + z2 / 2) / (n + z2)
    half = math.sqrt(z2) / (n + z2) * math.sqrt(n * share * (1 - share) + z2 / 4)
    # At the ends the interval touches 0 or 1 exactly; rounding must not leave the value outside.
    return Estimate(share, min(max(0.0, centre - half), share), max(min(1.0, centre + half), share), n)


def paired_difference(gained: int, lost: int, n: int, confidence: float = 0.95) -> Estimate:
    """Difference of two accuracies on the same n images [Bonett2012].

    `gained` images are right only under the first model, `lost` only under the second. Images on
    which both agree say nothing about the sign, so the interval is far shorter than for two samples.
    """
    _check_counts(gained + lost, n, confidence)
    z = float(ndtri(0.5 + confidence / 2))
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    value = (gained - lost) / n
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Estimate(value, min(low, value), max(high, value), n)


def mean(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean of n numbers with Student's interval; one number alone has none."""
    checks.whole("n", len(values), least=1)
    checks.strictly_within("confidence", confidence, 0, 1)
    n, middle = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Estimate(middle, -math.inf, math.inf, 1)
    variance = math.fsum((value - middle) ** 2 for value in values) / (n - 1)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * math.sqrt(variance / n)
    return Estimate(middle, middle - half, middle + half, n)


def _check_counts(successes: int, n: int, confidence: float) -> None:
    checks.whole("n", n, least=1)
    checks.require(0 <= successes <= n, "successes", f"lie in 0..{n}", successes)
    checks.strictly_within("confidence", confidence, 0, 1)
