"""Rules for mixing one pair: the table of all methods, and the trade-off between clean and attacked
accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from equipoise.core import format
from equipoise.core.aggregation import ROBUST, ComparedLine, compared_lines
from equipoise.reporting.charts import MODELS, OTHERS, Chart, Line, Panel
from equipoise.reporting.section import (
    INTERVALS,
    MISSING,
    Cell,
    RunView,
    Section,
    Table,
    model_cell,
    result_cell,
)

MARKERS, COLORS = "osD^vPX*<>", ("mixed", *OTHERS, "wrong")


def compared_rules(run: RunView) -> Section | None:
    """Every method with its map, accuracies and loss; the most accurate one in words."""
    lines = compared_lines(run.summary)
    if not lines:
        return None
    mixtures = [line for line in lines if line.method.mixture]
    n = format.counts(line.clean.n for line in lines)
    prose = [
        f"Every method was fitted to one target on other images and evaluated on the same n = {n} images. "
        "Attacked is the worst case over all attacks of a method, adaptive ones included; an image that one "
        "attack broke was not attacked by the next."
    ]
    if mixtures:
        best = max(mixtures, key=lambda line: line.clean.value)
        lost = (
            ""
            if best.lost is None
            else f", and loses {format.number(100 * best.lost.value, 1)} points under attack"
        )
        prose.insert(
            0,
            f"{best.method.name} has the highest clean accuracy of the mixtures, "
            f"{format.percent(best.clean.value)}{lost}.",
        )
    body = [
        [
            model_cell(line.method.name, line.method.description),
            result_cell(line.clean),
            result_cell(line.attacked),
            MISSING
            if line.lost is None
            else Cell(format.number(100 * line.lost.value, 1), format.bounds(line.lost)),
        ]
        for line in lines
    ]
    promises = [
        [Cell(line.method.name), Cell(line.method.promise)] for line in lines if line.method.promise
    ]
    tables = [
        Table(
            f"{INTERVALS}; points are those lost to the {ROBUST} model, image by image.",
            ["method", "clean", "attacked", "points lost"],
            body,
        )
    ]
    if promises:
        tables.append(
            Table(
                "What the fitting images say.",
                ["method", "it"],
                promises,
                is_text=True,
                collapsed=True,
            )
        )
    return Section(
        "Rules compared",
        prose,
        tables,
        [
            _trade_off(
                {
                    line.method.name: line
                    for line in lines
                    if line.method.name == line.method.measured_as
                }
            )
        ],
    )


def _trade_off(lines: Mapping[str, ComparedLine]) -> Chart:
    """Every method as a point, those of one family alike; far below the robust model only in
    words."""
    least = lines[ROBUST].attacked.value / 2 if ROBUST in lines else 0.0
    families: dict[str, list[ComparedLine]] = {}
    for name, line in lines.items():
        if line.attacked.value >= least:
            families.setdefault(name if name in MODELS else line.method.family, []).append(line)
    colors = dict(
        zip([family for family in families if family not in MODELS], cycle(COLORS), strict=False)
    )
    marks = [
        Line.of(
            [100 * line.clean.value for line in own],
            [line.attacked for line in own],
            colors.get(family, family),
            family if len(own) == 1 else f"{family}, {len(own)} seeds",
            bars=True,
            linestyle="",
            marker=marker,
        )
        for (family, own), marker in zip(families.items(), cycle(MARKERS))
    ]
    below = [
        f"{name} ({format.percent(line.clean.value)} clean, {format.percent(line.attacked.value)} attacked)"
        for name, line in lines.items()
        if line.attacked.value < least
    ]
    panel = Panel(
        marks, title=f"not shown: {', '.join(below)}" if below else "", title_color="muted"
    )
    return Chart(
        "compared-rules",
        "Attacked accuracy against clean accuracy of every method",
        [panel],
        x_label="clean accuracy, %",
        y_label="attacked accuracy, %",
        height=3.4,
    )
