"""Sections about attacks: every number is counted from the rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import explored_run
import pytest
from synthetic_run import THREAT, figure, shown, texts, values, write_run

from equipoise.core import aggregation, stats
from equipoise.core.audits import Audit
from equipoise.core.radius_curves import radius_curve
from equipoise.core.results import SanityCheck, Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import accuracy, attacks
from equipoise.reporting.run_view import RunView

# Image: clean, then the stage that breaks it and its passes; of 6 images 5 are right clean.
SUITE = {
    0: ("clean", 0),
    1: ("early", 8),
    2: ("late", 30),
    3: (None, 40),
    4: (None, 40),
    5: ("early", 10),
}


def row(index: int, attack: str, correct: bool, **more: Any) -> AttackRow:
    settings: dict[str, Any] = {"model": "m", "label": 0, **more}
    return AttackRow(
        index=index, attack=attack, correct=correct, predicted=int(not correct), **settings
    )


def view(rows: list[AttackRow], **more: Any) -> RunView:
    summary = Summary(
        command="evaluate",
        seconds=1.0,
        results=tuple(aggregation.accuracies(rows, THREAT)),
        **more,
    )
    return RunView(Path("run"), {"threat": THREAT.to_dict()}, {}, summary, list(rows))


@pytest.fixture
def rows() -> list[AttackRow]:
    listed = [row(i, "clean", i != 0) for i in SUITE]
    for i, (stage, passes) in SUITE.items():
        listed.append(row(i, "suite", stage is None, broken_by=stage, attack_passes=passes))
    return listed


def test_images_left_after_each_number_of_passes(rows: list[AttackRow]) -> None:
    curve = figure(attacks.attack_progress(view(rows)), "attack-progress-suite")
    assert values(curve, "m", "x", "y", "n") == [
        (0, round(5 / 6, 5), 6),
        (8, round(4 / 6, 5), 6),
        (10, 0.5, 6),
        (30, round(2 / 6, 5), 6),
        (40, round(2 / 6, 5), 6),
    ]
    exact = stats.clopper_pearson(3, 6)
    assert values(curve, "m", "y_low", "y_high", x=10) == [
        pytest.approx((exact.low, exact.high), abs=1e-5)
    ]


def test_what_only_an_audit_broke_is_left(rows: list[AttackRow]) -> None:
    rows[-2] = replace(rows[-2], correct=False, predicted=1, broken_by="audit/early")
    curve = figure(attacks.attack_progress(view(rows)), "attack-progress-suite")
    assert values(curve, "m", "y")[-1] == (round(2 / 6, 5),)


def test_rows_without_passes_have_no_progress(rows: list[AttackRow]) -> None:
    unknown = [replace(own, attack_passes=None) for own in rows]
    assert attacks.attack_progress(view(unknown)) is None


def test_stages_are_counted(rows: list[AttackRow]) -> None:
    section = attacks.broken_images(view(rows))
    counts = values(figure(section, "broken-by"), "m", "row", "count")
    assert counts == [("suite: early", 2), ("suite: late", 1)]


def test_broken_images_after_rounding_to_bytes(rows: list[AttackRow]) -> None:
    broken = [
        replace(own, broken_as_bytes=own.index == 1)
        if own.attack == "suite" and not own.correct
        else own
        for own in rows
    ]
    as_bytes = tuple(aggregation.as_bytes(broken, THREAT))
    table = shown(attacks.broken_images(view(broken, as_bytes=as_bytes))).tables[0]
    assert texts(table)[0][2].startswith("33.3 %") and texts(table)[0][3] == "3"


def test_margins_are_cumulative_shares() -> None:
    clean, attacked = [0.5, 0.9, -0.1, 0.7], [0.2, -0.4, -0.3, 0.6]
    rows = []
    for i in range(4):
        rows.append(row(i, "clean", clean[i] > 0, margin=clean[i]))
        rows.append(row(i, "pgd", attacked[i] > 0, margin=attacked[i]))
    curve = figure(attacks.margins(view(rows)), "margins")
    assert values(curve, "m", "x", "y", kind="under attack") == [
        (-0.4, 0.25),
        (-0.3, 0.5),
        (0.2, 0.75),
        (0.6, 1.0),
    ]
    assert [x for (x,) in values(curve, "m", "x", kind="clean")] == sorted(clean)


def test_radii_are_those_of_the_summary() -> None:
    radii = radius_curve("m", "linf", {0: 0.0, 1: 2 / 255, 2: math.inf}, 4 / 255)
    run = replace(
        view([]), summary=Summary(command="evaluate", seconds=1.0, radius_curves=(radii,))
    )
    section = attacks.radii(replace(run, rows=[row(0, "clean", True)]))
    assert texts(shown(section).tables[0]) == [["m", "2/255", "1", "1", "1"]]
    points = values(figure(section, "radius-curves"), "m", "x", "y")
    assert points[0] == (0.0, round(2 / 3, 5)) and points[-1] == (4.0, round(1 / 3, 5))


def test_checks_and_audits() -> None:
    check = SanityCheck(
        name="x", value=0.5, alarm=True, explanation="share", model="m", attack="fast"
    )
    checks = (check, replace(check, value=0.7, attack="pgd"), replace(check, name="y", alarm=False))
    audit = Audit(
        model="m",
        attack="fast",
        stronger="standard",
        n=10,
        survivors=8,
        audited=4,
        broken=1,
        excess=0.2,
        passes=7,
    )
    section = shown(attacks.checks(view([], sanity_checks=checks, audits=(audit,))))
    assert "1 of 3 checks raise no alarm" in section.text[0]
    failed, passed, audits = section.tables
    assert texts(failed) == [["x", "share.", "0.5 (m, fast); 0.7 (m, pgd)"]]
    assert texts(passed)[0][0] == "y" and passed.collapsed
    assert texts(audits)[0][1:4] == ["4 of 8", "1", "30.0 points run --attack standard"]
    assert attacks.checks(view([])) is None


def test_accuracy_under_each_attack(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=50, pictures=5)
    section = accuracy.accuracy(run)
    drawn = figure(section, "accuracy")
    for model in explored_run.NAMES:
        for metric, name in (("clean", "clean accuracy"), ("fast", "under fast")):
            result = run.find(model, metric)
            assert result is not None
            assert values(drawn, run.name(model), "value", "n", row=name) == [
                pytest.approx((result.value, 50), abs=1e-5)
            ]
    differences = texts(shown(section).tables[1])
    assert [row[0] for row in differences] == ["mixture − robust"] * 2


def test_classes_add_up_to_the_results(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=120, pictures=5)
    section = accuracy.classes(run)
    by_class = values(figure(section, "classes"), "mixture", "value", "n")
    robust = run.find("mixed", "worst")
    assert robust is not None and sum(n for _, n in by_class) == 120
    assert sum(round(value * n) for value, n in by_class) == robust.count
    wrong = [
        record
        for record in figure(section, "confusion").records
        if record["choice"] == "mixture, attacked images"
    ]
    assert sum(record["value"] for record in wrong) == 120 - robust.count


def test_clean_only_runs_have_no_attack_sections(tmp_path: Path) -> None:
    rows = [row(i, "clean", True) for i in range(4)]
    run = write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.0, results=tuple(aggregation.accuracies(rows, None))),
        rows,
    )
    for section in (
        accuracy.accuracy,
        accuracy.classes,
        attacks.attack_progress,
        attacks.broken_images,
        attacks.margins,
        attacks.radii,
        attacks.checks,
    ):
        assert section(run) is None
