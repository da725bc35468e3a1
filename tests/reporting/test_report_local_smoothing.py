"""Sections of the local-smoothing study with a fixed strength."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from synthetic_run import result, write_run

from equipoise.core.results import Summary
from equipoise.reporting import local_smoothing
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import RunView

IDENTITY = {"command": "reproduce", "study": "local-smoothing"}


def _trust(folder: Path, others: list[tuple[float, float]]) -> tuple[RunView, RunView]:
    """The study and its part `trust`: constant trust over probabilities, and points of another
    rule."""
    results = [
        result("accurate", "clean", 0.95),
        result("accurate", "worst", 0.0),
        result("robust", "clean", 0.80),
        result("robust", "worst", 0.50),
    ]
    for alpha, clean, worst in ((0.5, 0.94, 0.20), (0.9, 0.88, 0.46)):
        results += [
            result("constant, probabilities", "clean", clean, alpha=alpha),
            result("constant, probabilities", "worst", worst, alpha=alpha),
        ]
    for number, (clean, worst) in enumerate(others):
        results += [
            result("ratio, logits", metric, value, alpha=0.2 + 0.1 * number)
            for metric, value in (("clean", clean), ("worst", worst), ("pgd", worst))
        ]
    run = write_run(folder, Summary(command="reproduce", seconds=1.0), identity=IDENTITY)
    return run, write_run(
        folder / "trust", Summary(command="evaluate", seconds=1.0, results=tuple(results))
    )


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ((0.94, 0.19), "is the upper envelope"),
        (
            (0.94, 0.21),
            "not the upper envelope everywhere: 1 point of another rule lies above its line, by at most 1.0",
        ),
        ((0.94, 0.21), "None by more than the half-width"),
        ((0.94, 0.40), "By more than the half-width of their intervals: ratio, logits at γ = 0.25"),
        # Half way between (0.94, 0.20) and (0.88, 0.46) the line is at 0.33.
        ((0.91, 0.32), "is the upper envelope"),
        ((0.91, 0.34), "not the upper envelope"),
        # More accurate than the accurate model (0.95): the line is at zero there.
        ((0.96, 0.0), "is the upper envelope"),
        (
            (0.96, 0.3),
            "by at most 30.0 points (ratio, logits at γ = 0.25, beyond its accurate end)",
        ),
    ],
)
def test_the_envelope_is_claimed_only_if_it_is_one(
    tmp_path: Path, point: tuple[float, float], expected: str
) -> None:
    _, part = _trust(tmp_path / "run", [point])
    assert expected in local_smoothing.envelope(part)


def test_the_envelope_comes_first(tmp_path: Path) -> None:
    run, part = _trust(tmp_path / "run", [(0.94, 0.19)])
    section = local_smoothing.trust(run)
    assert section is not None and section.prose[0] == local_smoothing.envelope(part)


def test_a_curve_starts_and_ends_with_the_base_models(tmp_path: Path) -> None:
    _, part = _trust(tmp_path / "run", [(0.94, 0.19), (0.91, 0.30)])
    clean = local_smoothing.curve_with_ends(part, "ratio, logits", "clean")
    assert [(item.alpha, item.value) for item in clean] == [
        (0.0, 0.95),
        (0.2, 0.94),
        (pytest.approx(0.3), 0.91),
        (1.0, 0.80),
    ]


def test_ends_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    _, part = _trust(tmp_path / "run", [(0.94, 0.19), (0.91, 0.30)])
    attacked = local_smoothing.curve_with_ends(part, "ratio, logits", "pgd")
    assert [item.alpha for item in attacked] == [0.2, pytest.approx(0.3)]
    assert local_smoothing.curve_with_ends(part, "ratio, logits", "pgd-rob") == []


def test_the_fixed_strength_figure_has_a_line_per_attack(tmp_path: Path) -> None:
    run, _ = _trust(tmp_path / "run", [(0.94, 0.19), (0.91, 0.30)])
    section = local_smoothing.fixed_strength(run)
    assert section is not None
    with styled(LIGHT):
        axes = section.pictures[0].draw(LIGHT).axes[0]
    assert [line.get_label() for line in axes.lines] == ["clean", "attack on the rule"]


def test_neighbours_state_what_ties_add(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="reproduce", seconds=1.0), identity=IDENTITY)
    values = [
        result("5 neighbours, plain", metric, value, alpha=alpha)
        for metric in ("clean", "worst")
        for alpha, value in ((0.5, 0.9), (1.0, 0.85))
    ]
    write_run(
        run.folder / "neighbours", Summary(command="evaluate", seconds=1.0, results=tuple(values))
    )
    section = local_smoothing.neighbours(run)
    assert section is not None
    assert "the largest finite γ is 5.0 points above the vote alone" in section.prose[-1]
    assert [row[0].text for row in section.tables[0].body] == [
        "5 neighbours, plain, γ = 1",
        "5 neighbours, plain, γ = inf",
    ]


def test_strength_of_a_result() -> None:
    assert local_smoothing.strength(result("m", "clean", 0.5, alpha=1.0)) == math.inf
    assert local_smoothing.strength(result("m", "clean", 0.5, alpha=0.75)) == pytest.approx(3)


def test_zero_and_infinity_are_one_unit_beyond_their_neighbours() -> None:
    at = local_smoothing.positions([0.0, 0.1, 100.0, math.inf])
    assert list(at.values()) == pytest.approx([-2, -1, 2, 3])
    ticks = local_smoothing.strength_ticks([0.0, 0.1, 100.0, math.inf])
    assert ticks == {-1.0: "0.1", 0.0: "1", 1.0: "10", 2.0: "100", -2.0: "0", 3.0: "∞"}


def test_other_runs_have_none_of_these_sections(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))
    write_run(run.folder / "trust", Summary(command="evaluate", seconds=1.0))
    write_run(run.folder / "neighbours", Summary(command="evaluate", seconds=1.0))
    for section in (
        local_smoothing.trust,
        local_smoothing.fixed_strength,
        local_smoothing.neighbours,
    ):
        assert section(run) is None
