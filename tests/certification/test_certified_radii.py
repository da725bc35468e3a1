from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import betainc, ndtr, ndtri

from equipoise.certification import SmoothingPlan, radii
from equipoise.certification.mixture import THEOREMS
from equipoise.core.checks import InputError

p_above = st.floats(0.5001, 1 - 1e-7)
alphas = st.floats(0.5, 1.0)
sigmas = st.floats(0.01, 2.0)


def test_the_example_of_the_paper() -> None:
    """alpha = .79, p = .99: 1.99 sigma where Theorem A.2 with the same one bound gives .78."""
    assert radii.one_sided(0.99, 1.0, 0.79) == pytest.approx(1.99, abs=5e-3)
    assert radii.theorem_a2(0.99, 0.01, 1.0, 0.79) == pytest.approx(0.78, abs=5e-3)


@settings(deadline=None, max_examples=300)
@given(p_above, alphas, sigmas)
def test_never_smaller_than_theorem_a2(p: float, alpha: float, sigma: float) -> None:
    """Allowing for the slack by which both are rounded down."""
    assert (
        radii.one_sided(p, sigma, alpha) >= radii.theorem_a2(p, 1 - p, sigma, alpha) - 1e-7 * sigma
    )


@settings(deadline=None, max_examples=300)
@given(p_above, st.floats(0, 1), alphas, sigmas)
def test_two_sided_is_never_smaller_than_the_others(
    p: float, share: float, alpha: float, sigma: float
) -> None:
    q = share * (1 - p)
    both = radii.two_sided(p, q, sigma, alpha)
    assert both >= radii.theorem_a2(p, q, sigma, alpha) - 1e-7 * sigma
    assert both >= radii.one_sided(p, sigma, alpha) - 1e-7 * sigma


@settings(deadline=None, max_examples=200)
@given(p_above, sigmas)
def test_ends_of_alpha(p: float, sigma: float) -> None:
    assert radii.one_sided(p, sigma, 1.0) == pytest.approx(sigma * ndtri(p), rel=1e-6, abs=1e-8)
    assert radii.two_sided(p, 1 - p, sigma, 1.0) == pytest.approx(
        sigma * ndtri(p), rel=1e-6, abs=1e-8
    )
    assert radii.one_sided(p, sigma, 0.5) == 0 and radii.two_sided(p, 1 - p, sigma, 0.5) == 0


@settings(deadline=None, max_examples=200)
@given(st.tuples(p_above, p_above), st.tuples(alphas, alphas), st.tuples(sigmas, sigmas))
def test_monotone(
    p: tuple[float, float], alpha: tuple[float, float], sigma: tuple[float, float]
) -> None:
    for less, more in (
        (radii.one_sided(min(p), s, a), radii.one_sided(max(p), s, a)) for s in sigma for a in alpha
    ):
        assert less <= more
    assert radii.one_sided(p[0], sigma[0], min(alpha)) <= radii.one_sided(
        p[0], sigma[0], max(alpha)
    )
    assert (
        radii.one_sided(p[0], min(sigma), alpha[0])
        <= radii.one_sided(p[0], max(sigma), alpha[0]) + 1e-15
    )
    q = (1 - max(p)) / 2
    assert (
        radii.two_sided(min(p), q, 1.0, alpha[0])
        <= radii.two_sided(max(p), q, 1.0, alpha[0]) + 1e-9
    )
    assert (
        radii.two_sided(p[0], q, 1.0, min(alpha))
        <= radii.two_sided(p[0], q, 1.0, max(alpha)) + 1e-9
    )


@settings(deadline=None, max_examples=200)
@given(p_above, st.floats(0, 1), st.floats(0.51, 1.0))
def test_two_sided_keeps_the_margin_at_its_radius(p: float, share: float, alpha: float) -> None:
    """By its definition, and no further."""
    q = share * (1 - p)
    r = float(radii.two_sided(p, q, 1.0, alpha))
    if r > 0:
        margin = ndtr(ndtri(p) - r) - ndtr(ndtri(q) + r) if q > 0 else ndtr(ndtri(p) - r)
        assert margin >= (1 - alpha) / alpha - 1e-12


@settings(deadline=None, max_examples=200)
@given(p_above, sigmas, alphas)
def test_rounded_down(p: float, sigma: float, alpha: float) -> None:
    exact = sigma * (ndtri(p) - ndtri(1 / (2 * alpha)))
    assert radii.one_sided(p, sigma, alpha) <= max(exact, 0)


def exact_quantile(p: mpmath.mpf) -> mpmath.mpf:
    """Φ⁻¹ in 60 digits."""
    return -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * p)


near_certainty = st.builds(
    lambda digits, part: 1 - part * 10.0**-digits, st.integers(1, 15), st.floats(0.1, 1)
)
near_one_half = st.builds(
    lambda digits, part: 0.5 + part * 10.0**-digits, st.integers(1, 15), st.floats(0.1, 1)
)


@settings(deadline=None, max_examples=150)
@given(near_certainty, st.one_of(near_one_half, near_certainty.filter(lambda alpha: alpha >= 0.5)))
@example(0.9999999964898684, 0.5000000033608546)
def test_no_theorem_rounds_up(p: float, alpha: float) -> None:
    """Against 60 digits, also where a quantile magnifies the last digit of alpha or of a
    product."""
    with mpmath.workdps(60):
        own, weight = mpmath.mpf(p), mpmath.mpf(alpha)
        quantiles = [exact_quantile(value) for value in (own, 1 / (2 * weight), weight * own)]
        margin = own - (1 - own) - (1 - weight) / weight
        exact = {
            "ours": quantiles[0] - quantiles[1],
            "A.2": quantiles[2],
            "lipschitz": margin * mpmath.sqrt(mpmath.pi / 2),
            "3.5": margin * mpmath.sqrt(mpmath.pi / 8),
        }
        for theorem, value in exact.items():
            for q in (None, np.array(1 - p)):
                assert float(THEOREMS[theorem](np.array(p), 1.0, alpha, q)) <= max(value, 0), (
                    theorem
                )


@pytest.mark.parametrize("alpha", [0.49, -0.1, 1.01, float("nan")])
def test_alpha_outside(alpha: float) -> None:
    with pytest.raises(InputError, match="`alpha` must lie in"):
        radii.one_sided(0.9, 1.0, alpha)


def test_sigma_must_be_positive() -> None:
    with pytest.raises(InputError, match="`sigma` must be positive"):
        radii.one_sided(0.9, 0.0)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.floats(1e-5, 0.3),
)
def test_lower_bound_is_on_the_safe_side(count: tuple[int, int], failure: float) -> None:
    """At the bound itself, as many successes happen with probability at most `failure`."""
    k, n = count
    p = float(radii.lower_bound(k, n, failure))
    if p > 0:
        assert betainc(k, n - k + 1, p) <= failure
    assert 0 <= p <= k / n
    assert radii.upper_bound(k, n, failure) == pytest.approx(
        1 - radii.lower_bound(n - k, n, failure)
    )


def test_all_successes_in_closed_form() -> None:
    assert radii.lower_bound(100_000, 100_000, 0.001) == pytest.approx(
        0.001 ** (1 / 100_000), abs=1e-11
    )


def test_votes_must_sum_to_the_number_of_samples() -> None:
    with pytest.raises(InputError, match="`votes` must sum"):
        radii.two_sided_bounds(np.array([[3, 4]]), np.array([0]), 8, 0.05)
    with pytest.raises(InputError, match="`votes` must sum"):
        radii.VoteRule(SmoothingPlan(0.5)).bounds(
            np.array([[3.0, 4.0]]), np.array([8.0]), np.array([0]), 0.05
        )


def test_bad_counts_and_levels() -> None:
    with pytest.raises(InputError, match="`votes` must lie"):
        radii.lower_bound(9, 8, 0.05)
    for failure in (0.0, 1.0):
        with pytest.raises(InputError, match="`failure` must lie"):
            radii.lower_bound(3, 8, failure)
