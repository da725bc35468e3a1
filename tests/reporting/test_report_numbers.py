from __future__ import annotations

import pytest

from equipoise.reporting import numbers


@pytest.mark.parametrize(("value", "expected"), [
    (0.826, "82.6 %"), ("0.826", "82.6 %"), (0.0, "0.0 %"), (1, "100.0 %"), (-0.0001, "0.0 %"), (-0.0312, "−3.1 %"),
])
def test_percent(value: float | str, expected: str) -> None:
    assert numbers.percent(value) == expected


def test_interval_and_estimate() -> None:
    assert numbers.interval(-0.051, 0.849) == "[−5.1, 84.9]"
    told = {"value": 0.826, "low": 0.801, "high": 0.849, "n": 1000, "model": "mixed"}
    assert numbers.estimate(told) == "82.6 % [80.1, 84.9], n = 1000"


@pytest.mark.parametrize(("value", "expected"), [(0.097, "+9.7"), (-0.016, "−1.6"), (-0.0001, "0.0"), (0.0, "0.0")])
def test_points_carry_their_sign(value: float, expected: str) -> None:
    assert numbers.points(value) == expected
