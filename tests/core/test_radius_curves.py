from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.core import format, serialize, stats
from equipoise.core.aggregation import radius_curves
from equipoise.core.radius_curves import RadiusCurve, radius_curve
from equipoise.core.rows import AttackRow

RADII = st.lists(
    st.one_of(st.just(0.0), st.just(math.inf), st.floats(1e-6, 1.0)), min_size=1, max_size=30
)


@given(RADII)
def test_the_curve_is_the_share_of_larger_radii(radii: list[float]) -> None:
    curve = radius_curve("m", "l2", dict(enumerate(radii)), 1.0)
    values = [point.value for point in curve.points]
    assert values == sorted(values, reverse=True)
    assert len(values) == 21 and curve.points[0].radius == 0 and curve.points[-1].radius == 1
    for point in curve.points:
        larger = sum(radius > point.radius for radius in radii)
        exact = stats.clopper_pearson(larger, len(radii))
        assert (point.value, point.low, point.high, point.n) == (
            exact.value,
            exact.low,
            exact.high,
            exact.n,
        )
    assert curve.wrong + curve.broken + curve.survived == curve.n == len(radii)
    if curve.median is None:
        assert curve.survived > len(radii) / 2
    else:
        assert 2 * sum(radius <= curve.median for radius in radii) >= len(radii)
        assert 2 * sum(radius < curve.median for radius in radii) < len(radii)


def test_the_smallest_radius_over_attacks_counts() -> None:
    def row(
        index: int, attack: str, radius: float | None, largest: float | None = 0.5
    ) -> AttackRow:
        return AttackRow(
            index=index,
            model="m",
            attack=attack,
            label=0,
            correct=radius is None,
            radius=radius,
            max_radius=largest,
        )

    rows = [
        row(0, "clean", None, None),
        row(0, "minimum-norm", 0.4),
        row(0, "adaptive", 0.1),
        row(1, "minimum-norm", None),
        row(1, "adaptive", 0.3),
        row(2, "minimum-norm", None),
        row(2, "adaptive", None),
        row(2, "fast", None, None),
    ]
    (curve,) = radius_curves(rows, "l2")
    assert (curve.n, curve.wrong, curve.broken, curve.survived, curve.median) == (3, 0, 2, 1, 0.3)
    assert [point.value for point in curve.points[3:5]] == [1.0, 2 / 3]
    text = format.radius_table([curve])
    assert (
        "ℓ2" in text
        and "0 of 3 images misclassified without a perturbation, 2 with one, 1 not up to 0.5"
        in text
    )


def test_attacks_that_do_not_look_for_the_smallest_perturbation_have_no_curve() -> None:
    assert (
        radius_curves([AttackRow(index=0, model="m", attack="fast", label=0, correct=True)], "linf")
        == []
    )


@given(RADII)
def test_a_curve_is_read_as_it_was_written(radii: list[float]) -> None:
    """Also one without a median, of a model that most images survive."""
    curve = radius_curve("m", "l2", dict(enumerate(radii)), 1.0)
    assert serialize.from_plain(RadiusCurve, serialize.to_plain(curve), "curve") == curve
