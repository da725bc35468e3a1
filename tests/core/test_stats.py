from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from equipoise.core import stats
from equipoise.core.checks import InputError

counts = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(deadline=None)
@given(counts, st.floats(0.5, 0.999))
def test_against_scipy(count: tuple[int, int], confidence: float) -> None:
    k, n = count
    estimate = stats.clopper_pearson(k, n, confidence)
    expected = oracle.binomtest(k, n).proportion_ci(confidence, method="exact")
    assert estimate.low == pytest.approx(expected.low, abs=1e-9)
    assert estimate.high == pytest.approx(expected.high, abs=1e-9)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def _coverage(n: int, p: float) -> float:
    inside = 0.0
    for k in range(n + 1):
        estimate = stats.clopper_pearson(k, n)
        inside += oracle.binom.pmf(k, n, p) * (estimate.low <= p <= estimate.high)
    return inside


@pytest.mark.parametrize("p", [0.001, 0.05, 0.31, 0.5, 0.9])
def test_clopper_pearson_covers_as_promised(p: float) -> None:
    """Summed over every possible count, exactly: a guarantee, not a sample of it."""
    assert _coverage(40, p) >= 0.95


def test_paired_difference_covers() -> None:
    """Joint law of (gained, lost) with known shares, summed exactly."""
    n, up, down = 30, 0.2, 0.1
    inside = 0.0
    for gained in range(n + 1):
        for lost in range(n - gained + 1):
            weight = oracle.multinomial.pmf(
                [gained, lost, n - gained - lost], n, [up, down, 1 - up - down]
            )
            estimate = stats.paired_difference(gained, lost, n)
            inside += weight * (estimate.low <= up - down <= estimate.high)
    assert 0.94 <= inside <= 0.98


def test_paired_difference_is_antisymmetric() -> None:
    ours, theirs = stats.paired_difference(30, 5, 100), stats.paired_difference(5, 30, 100)
    assert ours.value == pytest.approx(0.25)
    assert (ours.low, ours.high) == pytest.approx((-theirs.high, -theirs.low))


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (0, 0)])
def test_bad_counts(k: int, n: int) -> None:
    with pytest.raises(InputError):
        stats.clopper_pearson(k, n)


def test_mean_against_scipy() -> None:
    values = [0.0, 0.3, 0.1, 0.9, 0.0]
    found = stats.mean(values)
    expected = oracle.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.value == pytest.approx(0.26) and found.n == 5
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert stats.mean([0.5]).high == float("inf")
    with pytest.raises(InputError):
        stats.mean([])


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("population", range(13))
def test_the_hypergeometric_bound_covers_and_is_the_smallest(
    population: int, confidence: float
) -> None:
    """Every population and sample size up to 12: samples are counted, and each bound is compared
    with a search."""
    for sample in range(population + 1):
        bound = [
            stats.hypergeometric_upper(x, sample, population, confidence) for x in range(sample + 1)
        ]
        assert bound == sorted(bound) and bound[sample] == population
        ways = [
            [comb(total, x) * comb(population - total, sample - x) for x in range(sample + 1)]
            for total in range(population + 1)
        ]
        everything = comb(population, sample)
        for total, own in enumerate(ways):
            missed = sum(count for x, count in enumerate(own) if bound[x] < total)
            assert missed <= (1 - confidence) * everything * (1 + 1e-12), (sample, total)
        for x in range(sample + 1):
            plausible = [
                total
                for total, own in enumerate(ways)
                if sum(own[: x + 1]) >= (1 - confidence) * everything * (1 - 1e-12)
            ]
            assert bound[x] == max(plausible), (sample, x)


def test_the_hypergeometric_bound_against_all_samples() -> None:
    """Nothing but subsets: of the 3 successes among 9, a bound below 3 comes from at most 5 % of
    the samples of 4."""
    samples = [sum(member < 3 for member in chosen) for chosen in combinations(range(9), 4)]
    missed = sum(stats.hypergeometric_upper(x, 4, 9) < 3 for x in samples)
    assert missed <= 0.05 * len(samples)
    assert stats.hypergeometric_upper(0, 4, 9) == max(
        total
        for total in range(10)
        if sum(all(member >= total for member in chosen) for chosen in combinations(range(9), 4))
        >= 0.05 * 126
    )


def test_the_hypergeometric_bound_covers_in_simulation() -> None:
    chance, missed = np.random.default_rng(0), 0
    for _ in range(2000):
        total = int(chance.integers(0, 460))
        drawn = int(chance.hypergeometric(total, 459 - total, 64))
        missed += stats.hypergeometric_upper(drawn, 64, 459) < total
    assert missed <= 0.05 * 2000 + 3 * (2000 * 0.05 * 0.95) ** 0.5


def test_unusable_counts_of_a_sample_are_one_sentence() -> None:
    with pytest.raises(InputError, match=r"`sample` must lie in 0..5, got 6"):
        stats.hypergeometric_upper(0, 6, 5)
    with pytest.raises(InputError, match=r"`successes` must lie in 0..3, got 4"):
        stats.hypergeometric_upper(4, 3, 5)


POPULATIONS: dict[
    str, tuple[list[float], list[float]]
] = {  # probabilities of a correct pass, and how frequent each is
    "equal": ([0.9], [1]),
    "almost always": ([0.99], [1]),
    "deterministic": ([0, 1], [0.1, 0.9]),
    "few far away": ([0, 0.95], [0.03, 0.97]),
    "few uncertain": ([0.5, 1], [0.1, 0.9]),
    "spread": ([0.05, 0.3, 0.5, 0.8, 1], [0.3, 0.1, 0.1, 0.2, 0.3]),
    "rare": ([0.3, 0.999], [0.02, 0.98]),
}


def _share_coverage(name: str, n: int, passes: int, draws: int) -> float:
    """How often the interval of a mean share covers the mean probability over all images of a
    population."""
    (values, weights), generator = POPULATIONS[name], np.random.default_rng(0)
    shares = (
        generator.binomial(passes, generator.choice(values, size=(draws, n), p=weights)) / passes
    )
    estimates = [stats.mean_share(row.tolist(), passes) for row in shares]
    return float(np.mean([e.low <= np.dot(values, weights) <= e.high for e in estimates]))


@pytest.mark.parametrize("name", POPULATIONS)
def test_the_interval_of_a_mean_share_covers(name: str) -> None:
    """300 draws; Student's interval covers 44 % for "few far away" and 28 % for "rare"."""
    assert _share_coverage(name, 16, 50, 300) >= 0.95 - 3 * (0.05 * 0.95 / 300) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 10, 50])
@pytest.mark.parametrize("n", [16, 64, 500])
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_interval_of_a_mean_share_covers_everywhere(name: str, n: int, passes: int) -> None:
    covered = _share_coverage(name, n, passes, 2000)
    print(f"{name}, {n} images, {passes} passes: {covered:.3f} of 2000")
    assert covered >= 0.95 - 3 * (0.05 * 0.95 / 2000) ** 0.5


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40))
@example([0] * 11 + [11] * 14)  # 0.56 · 25 is not 14
def test_a_mean_share_is_between_one_pass_per_image_and_independent_passes(
    counts: list[int],
) -> None:
    shares, n = [count / 20 for count in counts], len(counts)
    estimate = stats.mean_share(shares, 20)
    independent = stats.clopper_pearson(sum(counts), 20 * n)
    assert estimate.low <= independent.low + 1e-9 and independent.high - 1e-9 <= estimate.high
    assert estimate.low <= estimate.value <= estimate.high and estimate.n == n
    flags = [count > 10 for count in counts]
    assert stats.mean_share([float(flag) for flag in flags], 1) == stats.share(flags)


def test_a_mean_paired_difference() -> None:
    """Of verdicts it is that of [Bonett2012], but with Student's quantile."""
    ours, theirs = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50
    exact, found = stats.paired_difference(10, 0, 100), stats.mean_paired_difference(ours, theirs)
    assert found.value == pytest.approx(0.1) and found.n == 100
    assert found.low == pytest.approx(exact.low, abs=0.003) and found.high == pytest.approx(
        exact.high, abs=0.003
    )
    with pytest.raises(InputError, match=r"`shares` must lie in 0\.\.1"):
        stats.mean_share([0.5, 1.5], 2)


@pytest.mark.parametrize("n", [0, 1, 7, 500])
@pytest.mark.parametrize("probability", [0.0, 0.002, 0.3, 1.0])
def test_upper_quantile_of_a_binomial_number(n: int, probability: float) -> None:
    for tail in (1e-6, 0.01, 0.5):
        k = stats.binomial_upper_quantile(tail, n, probability)
        assert oracle.binom.sf(k, n, probability) <= tail and (
            k == 0 or oracle.binom.sf(k - 1, n, probability) > tail
        )
