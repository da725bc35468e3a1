"""How many calibration images may be lost, and whether a measured loss keeps a promise."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from equipoise.core.checks import InputError
from equipoise.core.promises import PromiseCheck, Target, allowed_losses_with_confidence
from equipoise.core.threat import Threat


@pytest.mark.parametrize("n", [1, 58, 59, 100, 298, 299, 500])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.3, 0.999])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_allowed_losses_are_those_of_the_exact_bound(
    n: int, share: float, confidence: float
) -> None:
    allowed = [m for m in range(n + 1) if binom.cdf(m, n, share) <= 1 - confidence]
    assert allowed_losses_with_confidence(share, n, confidence) == max(allowed, default=-1)


@pytest.mark.parametrize(
    "target",
    [
        Target(0.01),
        Target(0.05),
        Target(0.3),
        Target(0.01, confidence=0.95),
        Target(0.1, True, 0.99),
    ],
)
def test_least_images(target: Target) -> None:
    least = target.least_images
    assert least is not None and target.allowed(least, least) >= 0
    assert target.allowed(least - 1, least - 1) < 0
    assert Target(0.0, confidence=0.95).least_images is None


def test_confidence_allows_fewer_losses() -> None:
    assert (
        Target(0.02).allowed(500, 100) == 9 and Target(0.02, confidence=0.95).allowed(500, 100) == 4
    )
    assert Target(0.1, of_robust=True, confidence=0.95).allowed(500, 100) == 4, (
        "of the robust images"
    )
    assert (
        Target(0.02).kind == "in expectation"
        and Target(0.02, confidence=0.95).kind == "with 95 % confidence"
    )


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.5])
def test_confidence_lies_between_zero_and_one(confidence: float) -> None:
    with pytest.raises(InputError, match="`confidence` must"):
        Target(0.01, confidence=confidence)


def check(value: float, low: float, high: float, target: Target) -> PromiseCheck:
    return PromiseCheck(
        value=value,
        low=low,
        high=high,
        n=1000,
        model="mixed",
        versus="robust",
        promised=target,
        threat=Threat("linf", "8/255"),
    )


def test_a_promise_that_was_kept() -> None:
    kept = check(0.012, 0.005, 0.019, Target(0.02))
    assert kept.kept and kept.is_clear
    assert kept.explanation == (
        "the promise was kept on these 1000 images: 1.2 [0.5, 1.9] points of robust accuracy "
        "lost against robust, at most 2 promised in expectation"
    )


def test_a_promise_that_was_exceeded() -> None:
    exceeded = check(0.024, 0.015, 0.033, Target(0.02))
    assert not exceeded.kept and not exceeded.is_clear
    assert "exceeded by 0.4 points on these 1000 images: 2.4 [1.5, 3.3]" in exceeded.explanation
    assert "the 95 % interval includes the promised loss" in exceeded.explanation
    assert "a third of all fits exceed" in exceeded.explanation
    confident = check(0.15, 0.12, 0.18, Target(0.1, of_robust=True, confidence=0.95)).explanation
    assert (
        "exceeded by 5.0 % on these" in confident
        and "15.0 [12.0, 18.0] % of the robust images" in confident
    )
    assert "third" not in confident and "interval" not in confident


def test_nothing_lost_is_not_minus_zero() -> None:
    assert ": 0.0 [-10.7, 10.7] points" in check(-0.0, -0.107, 0.107, Target(0.02)).explanation
