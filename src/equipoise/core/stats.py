"""Confidence intervals for accuracies, means and paired differences."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.special import bdtrc, betaincinv, ndtri, stdtrit

from equipoise.core import checks
from equipoise.core.serialize import Count


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that covers the truth with the stated confidence."""

    value: float
    low: float
    high: float
    n: Count


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Exact two-sided binomial interval: covers with at least the stated confidence, for every
    n."""
    _check_counts(successes, n, confidence)
    tail = (1 - confidence) / 2
    low = float(betaincinv(successes, n - successes + 1, tail)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, n - successes, 1 - tail)) if successes < n else 1.0
    return Estimate(successes / n, low, high, n)


def of_share(share: float, n: int) -> Estimate:
    """A share of n images with its exact interval."""
    return clopper_pearson(round(share * n), n)


def binomial_upper_quantile(tail: float, n: int, probability: float) -> int:
    """The smallest k that a binomial number of n trials exceeds with a probability of at most
    `tail`.

    `scipy.stats` has it too, but takes half a second to import.
    """
    return bisect.bisect_left(range(n), True, key=lambda k: bool(bdtrc(k, n, probability) <= tail))


def hypergeometric_upper(
    successes: int, sample: int, population: int, confidence: float = 0.95
) -> int:
    """Exact one-sided bound on the successes in a population of which a random sample was drawn
    without replacement.

    The largest number D for which a sample with at most so many successes has a probability of at
    least 1 − confidence: with D successes in the population, the number X in a sample is
    hypergeometric, and P(X ≤ x | D) falls as D grows. Whatever the truth, the bound is below it in
    at most a share 1 − confidence of all samples. Integers throughout, so nothing is rounded.

    >>> hypergeometric_upper(0, 64, 459)
    19
    """
    checks.whole("population", population, least=0)
    checks.require(0 <= sample <= population, "sample", f"lie in 0..{population}", sample)
    checks.require(0 <= successes <= sample, "successes", f"lie in 0..{sample}", successes)
    checks.strictly_within("confidence", confidence, 0, 1)
    least = (1 - Fraction(str(confidence))) * math.comb(population, sample)

    def is_plausible(total: int) -> bool:
        ways = sum(
            math.comb(total, drawn) * math.comb(population - total, sample - drawn)
            for drawn in range(successes + 1)
        )
        return ways >= least

    # Plausible from `successes` on, until it is not.
    totals = range(successes, population - (sample - successes) + 1)
    return totals[
        bisect.bisect_left(totals, True, lo=1, key=lambda total: not is_plausible(total)) - 1
    ]


def is_random_sample(
    counts: Sequence[int], population: Sequence[int], level: float, seed: int = 0
) -> bool:
    """Whether the counts of several classes are as a random sample without replacement may have
    them.

    An exact test at the level `level`, however few the items are: Pearson's statistic of the counts
    is compared with that of 2/level − 1 random samples, and must not be among the two largest. It
    draws until it knows.

    Args:
        counts: items of each class in the sample.
        population: items of each class in the population that it comes from.
        level: probability, over the samples and the seed, that a random sample is called another
            one.
        seed: of the random samples to compare with.
    """
    n, sizes = sum(counts), np.array([size for size in population if size > 0])
    own = np.array([count for count, size in zip(counts, population, strict=True) if size > 0])
    fits = own.sum() == n and bool((own <= sizes).all())
    checks.require(fits, "counts", "be at most those of the population", counts)
    checks.strictly_within("level", level, 0, 1)
    if n in (0, sizes.sum()):
        return True
    expected = n * sizes / sizes.sum()
    statistic = ((own - expected) ** 2 / expected).sum() * (1 - 1e-12)
    generator, left, larger = np.random.default_rng(seed), round(2 / level) - 1, 0
    while left > 0 and larger < 2:
        draws = generator.multivariate_hypergeometric(
            sizes, n, size=min(left, 100), method="marginals"
        )
        larger, left = (
            larger + int((((draws - expected) ** 2 / expected).sum(axis=1) >= statistic).sum()),
            left - 100,
        )
    return larger >= 2


def share(flags: Iterable[object]) -> Estimate:
    """The share of true values, with its exact interval.

    >>> share([True, False, True, True]).value
    0.75
    """
    values = [bool(flag) for flag in flags]
    return clopper_pearson(sum(values), len(values))


def paired_difference(gained: int, lost: int, n: int, confidence: float = 0.95) -> Estimate:
    """Difference of two accuracies on the same n images [Bonett2012].

    `gained` images are classified correctly only by the first model, `lost` only by the second.
    Images on which both agree do not widen the interval, which is far shorter than for two
    independent samples.
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


def mean_share(shares: Sequence[float], passes: int, confidence: float = 0.95) -> Estimate:
    """Mean of n shares with an interval: of n images, each classified `passes` times by a
    randomised model.

    The images are independent, the passes over one image are not: the interval is that of Clopper
    and Pearson with an effective number of images, n m (1 − m) / v for a mean m and a variance v of
    the shares [KornGraubard1998]. It lies between n, the number of images, and n · passes. As in
    :func:`paired_difference`, one image that is always and one that is never classified correctly
    are added for v: few images with a share far from the others are easily missed. With one pass,
    or shares of 0 and 1 alone, this is :func:`clopper_pearson`.

    >>> mean_share([1, 1, 0, 1], passes=50) == clopper_pearson(3, 4)
    True
    """
    n, total = len(shares), math.fsum(shares)
    _check_counts(0, n, confidence)
    middle = total / n
    checks.whole("passes", passes, least=1)
    checks.require(
        all(0 <= value <= 1 for value in shares),
        "shares",
        "lie in 0..1",
        [min(shares), max(shares)],
    )
    variance = float(np.var([*shares, 0.0, 1.0]))
    images = min(max(n * middle * (1 - middle) / variance, n), n * passes)
    tail, correct = (1 - confidence) / 2, total * (images / n)  # exact where the factor is 1
    low = float(betaincinv(correct, images - correct + 1, tail)) if middle > 0 else 0.0
    high = float(betaincinv(correct + 1, images - correct, 1 - tail)) if middle < 1 else 1.0
    return Estimate(middle, low, high, n)


def mean_paired_difference(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95
) -> Estimate:
    """Mean difference of two shares of passes on the same n images, with Student's interval.

    As in :func:`paired_difference`, one image that only the first model and one that only the
    second classifies correctly are added, so that it never has width zero.
    """
    differences = [own - other for own, other in zip(ours, theirs, strict=True)]
    value, adjusted = (
        mean(differences, confidence).value,
        mean([*differences, 1.0, -1.0], confidence),
    )
    return Estimate(
        value,
        min(max(-1.0, adjusted.low), value),
        max(min(1.0, adjusted.high), value),
        len(differences),
    )


def _check_counts(successes: int, n: int, confidence: float) -> None:
    checks.whole("n", n, least=1)
    checks.require(0 <= successes <= n, "successes", f"lie in 0..{n}", successes)
    checks.strictly_within("confidence", confidence, 0, 1)
