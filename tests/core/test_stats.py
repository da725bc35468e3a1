from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
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
            weight = oracle.multinomial.pmf([gained, lost, n - gained - lost], n, [up, down, 1 - up - down])
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


def _verdicts(clean: int, attacked: int, n: int = 100) -> NDArray[np.bool_]:
    return np.stack([np.arange(n) < clean, np.arange(n) < attacked])


def test_the_lead_is_over_the_line_at_equal_accuracy_under_attack() -> None:
    line = np.stack([_verdicts(80, 50), _verdicts(90, 40), _verdicts(94, 20)])
    for point, value in ((_verdicts(85, 45), 0.0), (_verdicts(88, 45), 0.03), (_verdicts(90, 30), -0.02),
                         (_verdicts(80, 50), 0.0)):
        found = stats.lead(point, line[[2, 0, 1]])  # whatever their order
        assert found is not None and found.value == pytest.approx(value)
        assert found.low <= found.value <= found.high and found.n == 100
    same = stats.lead(line[0], line[[0, 1]])
    assert same is not None and same.low < 0 < same.high, "no difference seen is not none there"
    for beyond in (51, 19):
        assert stats.lead(_verdicts(85, beyond), line) is None, "beyond the line nothing is known"
    with pytest.raises(InputError, match="`line` must hold at least two models, got 1"):
        stats.lead(_verdicts(85, 45), line[:1])


def test_the_interval_of_a_lead_covers() -> None:
    chance, n, inside = np.random.default_rng(1), 200, 0
    truth = 0.87 - 0.85  # (87, 45) over the line from (80, 50) to (90, 40)
    for trial in range(150):
        luck = chance.random((2, n))
        line = np.stack([luck < np.array([[a], [b]]) for a, b in ((0.8, 0.5), (0.9, 0.4))])
        found = stats.lead(luck < np.array([[0.87], [0.45]]), line, draws=300, seed=trial)
        inside += found is not None and found.low <= truth <= found.high
    assert inside >= 135
