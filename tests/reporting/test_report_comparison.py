"""The section of a comparison of mixing rules."""

from __future__ import annotations

from pathlib import Path

from synthetic_run import THREAT, section_titles, write_run

from equipoise.core import aggregation
from equipoise.core.comparison import ComparedMethod
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting.charts import Chart, Line
from equipoise.reporting.comparison import compared_rules

CORRECT = {
    "accurate": (10, 0),
    "robust": (6, 5),
    "confidence switch": (9, 4),
}  # of ten images: clean, attacked


def test_the_table_and_the_most_accurate_mixture(tmp_path: Path) -> None:
    rows = [
        AttackRow(index=index, model=model, attack=attack, label=0, correct=index < count)
        for model, counts in CORRECT.items()
        for attack, count in zip(("clean", "attacked"), counts, strict=True)
        for index in range(10)
    ]
    methods = [
        ComparedMethod(
            name=name,
            family=name,
            mixture="alpha 0.7" if name not in ("accurate", "robust") else "",
            measured_as=name,
        )
        for name in CORRECT
    ]
    methods.append(
        ComparedMethod(
            name="auto (confidence switch)",
            family="auto",
            mixture="alpha 0.7",
            measured_as="confidence switch",
            promise="promises something",
        )
    )
    summary = Summary(
        command="compare-rules",
        seconds=1.0,
        results=tuple(aggregation.accuracies(rows, THREAT)),
        differences=tuple(aggregation.differences(rows, [("confidence switch", "robust")], THREAT)),
        compared=tuple(methods),
    )
    run = write_run(tmp_path / "run", summary, rows)
    section = compared_rules(run)
    assert section is not None and section.prose[0] == (
        "confidence switch has the highest clean accuracy of the mixtures, 90.0 %, and loses 10.0 points under attack."
    )
    table, promises = section.tables
    assert [[cell.text for cell in line] for line in table.body] == [
        ["accurate", "100.0 %", "0.0 %", "–"],
        ["robust", "60.0 %", "50.0 %", "–"],
        ["confidence switch", "90.0 %", "40.0 %", "10.0"],
        ["auto (confidence switch)", "90.0 %", "40.0 %", "10.0"],
    ]
    assert [[cell.text for cell in line] for line in promises.body] == [
        ["auto (confidence switch)", "promises something"]
    ]
    assert "Rules compared" in section_titles(run)
    (chart,) = section.pictures
    assert isinstance(chart, Chart)
    (panel,) = chart.panels
    assert [(mark.label, mark.x, mark.y) for mark in panel.marks if isinstance(mark, Line)] == [
        ("robust", [60.0], [50.0]),
        ("confidence switch", [90.0], [40.0]),
    ]
    assert panel.title == "not shown: accurate (100.0 % clean, 0.0 % attacked)"


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    assert (
        compared_rules(write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0)))
        is None
    )
