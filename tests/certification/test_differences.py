"""Is one class more probable than another by a margin? Tested at the margin itself, where most
errors happen."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial

from equipoise.certification import ABSTAIN, differences, radii
from equipoise.certification.mixture import predict_from_votes
from equipoise.certification.radii import Floats

COUNT, FAILURE = 20_000, 0.05


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.3), (0.6, 0.1), (0.3, 0.5), (0.45, 0.45)])
def test_errors_at_the_margin(p: float, q: float) -> None:
    """At most the failure probability, by an exact binomial test, and at least a third of it."""
    n = 120
    votes = np.random.default_rng(1).multinomial(n, [p, q, 1 - p - q], size=COUNT)[:, :2]
    pairs, index = np.unique(votes, axis=0, return_inverse=True)
    ones = np.ones(len(pairs))
    wrong = differences.exceeds(
        pairs[:, 0].astype(float),
        pairs[:, 1].astype(float),
        n * ones,
        (p - q) * ones,
        FAILURE * ones,
    )[index.reshape(-1)]
    assert binomtest(int(wrong.sum()), COUNT, FAILURE, alternative="greater").pvalue > 1e-4
    assert wrong.mean() >= FAILURE / 3


def test_the_p_value_is_no_smaller_than_the_exact_one() -> None:
    """Against the sum over all counts, at the s of the observation and others."""
    n, votes, other, margin = 25, 17, 3, 0.2
    k = np.array([(x, y, n - x - y) for x in range(n + 1) for y in range(n + 1 - x)])
    as_large = k[k[:, 0] - k[:, 1] >= votes - other]
    for s in (0.6, 0.8, 1.0):
        exact = multinomial.pmf(as_large, n, [(s + margin) / 2, (s - margin) / 2, 1 - s]).sum()
        assert differences.p_value(votes, other, n, margin, FAILURE) >= exact


@pytest.mark.parametrize(("margin", "expected"), [(0.9, 1.0), (-0.9, 0.1 * FAILURE)])
def test_a_margin_beyond_both_classes(margin: float, expected: float) -> None:
    """Few votes for either class: p ≤ q + 0.9 is certainly true, and p ≤ q − 0.9 is not."""
    assert differences.p_value(10, 5, 100, margin, FAILURE) == pytest.approx(expected)


def test_bounds_and_exact_test_share_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either could call a true "no" a "yes", so that the whole failure for each would allow twice
    as many."""
    spent = []

    def bound(votes: Floats, n: Floats, failure: Floats) -> Floats:
        spent.append(float(failure[0]))
        return votes / n

    def p_value(votes: int, other: int, n: int, margin: float, failure: float) -> float:
        spent.append(failure)
        return 1.0

    for name, function in (("lower_bound", bound), ("upper_bound", bound), ("p_value", p_value)):
        monkeypatch.setattr(differences, name, function)
    one = np.ones(1)
    differences.exceeds(
        60 * one, 40 * one, 100 * one, 0.2 * one, FAILURE * one
    )  # a tie: the bounds do not decide
    differences.exceeds(64 * one, 35 * one, 100 * one, 0.3 * one, 0.5 * one)
    assert len(spent) == 4 + 1 and sum(spent[:2]) < FAILURE and sum(spent[2:]) <= 0.5


def test_never_weaker_than_two_bounds() -> None:
    rng = np.random.default_rng(2)
    votes = rng.multinomial(80, [0.5, 0.3, 0.2], size=200).astype(float)
    n, margin, level = np.full(200, 80.0), np.full(200, 0.1), np.full(200, FAILURE)
    exact = differences.exceeds(votes[:, 0], votes[:, 1], n, margin, level)
    bounds = (
        radii.lower_bound(votes[:, 0], n, level / 2)
        > radii.upper_bound(votes[:, 1], n, level / 2) + margin
    )
    assert (exact >= bounds).all() and exact.sum() > bounds.sum()


@pytest.mark.parametrize(("p", "accurate"), [((0.55, 0.3, 0.15), 1), ((0.3, 0.55, 0.15), 0)])
def test_mixture_predictions_at_a_tie(p: tuple[float, ...], accurate: int) -> None:
    """The classes of g and h tie at this alpha: either prediction is wrong, and each happens at
    most so often."""
    alpha = 1 / (1 + abs(p[0] - p[1]))
    votes = np.random.default_rng(3).multinomial(100, p, size=COUNT)
    rows, index = np.unique(votes, axis=0, return_inverse=True)
    top = np.full(len(rows), int(np.argmax(p)))
    predicted = predict_from_votes(
        rows.astype(float),
        np.full(len(rows), 100.0),
        top,
        np.full(len(rows), accurate),
        alpha,
        FAILURE,
    )[index.reshape(-1)]
    for label in (0, 1):
        assert (
            binomtest(int((predicted == label).sum()), COUNT, FAILURE, alternative="greater").pvalue
            > 1e-4
        )
    assert (predicted != ABSTAIN).mean() >= FAILURE
