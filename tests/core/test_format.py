from __future__ import annotations

import pytest

from equipoise.core import format
from equipoise.core.results import Result


def _result(metric: str, value: float) -> Result:
    return Result(model="mixed", metric=metric, value=value, low=value - 0.025, high=value + 0.025, n=1000)


@pytest.mark.parametrize(("value", "expected"), [
    (0.826, "82.6 %"), (0.0, "0.0 %"), (1, "100.0 %"), (-0.0001, "0.0 %"), (-0.0312, "−3.1 %"),
])
def test_percent(value: float, expected: str) -> None:
    assert format.percent(value) == expected


def test_intervals_have_a_minus_sign() -> None:
    assert format.interval(-0.051, 0.849) == "[−5.1, 84.9]"


def test_shares_are_in_percent_and_other_metrics_are_not() -> None:
    assert format.estimate(_result("clean", 0.826)) == "82.6 % [80.1, 85.1], n = 1000"
    assert format.estimate(_result("acr", 0.826)) == "0.826 [0.801, 0.851], n = 1000"


@pytest.mark.parametrize(("value", "expected"), [(0.097, "+9.7"), (-0.016, "−1.6"), (-0.0001, "0.0"), (0.0, "0.0")])
def test_points_have_a_sign(value: float, expected: str) -> None:
    assert format.points(value) == expected


def test_a_label_has_the_alpha_of_a_sweep() -> None:
    assert format.label("mixed", None) == "mixed" and format.label("mixed", 0.81234) == "mixed (alpha 0.8123)"


@pytest.mark.parametrize(("numbers", "expected"), [([5], "5"), ([5, 5], "5"), ([9, 8, 9], "8 to 9")])
def test_counts(numbers: list[int], expected: str) -> None:
    assert format.counts(numbers) == expected


def test_short_names_distinguish_models() -> None:
    assert format.short_names(["file:/a/best.pth", "file:/a/last.pt (sigma 0.1)", "robust"]) == {
        "file:/a/best.pth": "best", "file:/a/last.pt (sigma 0.1)": "last (sigma 0.1)", "robust": "robust"}
