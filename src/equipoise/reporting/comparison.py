"""Rules for mixing one pair: the table of all methods, and the trade-off between clean and attacked accuracy."""

from __future__ import annotations

from equipoise.core import format
from equipoise.core.aggregation import ROBUST, compared_lines
from equipoise.reporting.charts import Chart, Line, Panel, model_colors
from equipoise.reporting.section import INTERVALS, MISSING, Cell, RunView, Section, Table, model_cell, result_cell

MARKERS = "osD^vPX*<>"


def compared_rules(run: RunView) -> Section | None:
    """Every method with its map, accuracies and loss; the most accurate one in words."""
    lines = compared_lines(run.summary)
    if not lines:
        return None
    mixtures = [line for line in lines if line.method.mixture]
    n = format.counts(line.clean.n for line in lines)
    prose = [f"Every method was fitted to one target on other images and evaluated on the same n = {n} images. "
             "Attacked is the worst case over all attacks of a method, adaptive ones included; an image that one "
             "attack broke was not attacked by the next."]
    if mixtures:
        best = max(mixtures, key=lambda line: line.clean.value)
        lost = "" if best.lost is None else f", and loses {format.number(100 * best.lost.value, 1)} points under attack"
        prose.insert(0, f"{best.method.name} has the highest clean accuracy of the mixtures, "
                     f"{format.percent(best.clean.value)}{lost}.")
    body = [[model_cell(line.method.name, line.method.mixture), result_cell(line.clean), result_cell(line.attacked),
             MISSING if line.lost is None else Cell(format.number(100 * line.lost.value, 1), format.bounds(line.lost))]
            for line in lines]
    promises = [[Cell(line.method.name), Cell(line.method.promise)] for line in lines if line.method.promise]
    tables = [Table(f"{INTERVALS}; points are those lost to the {ROBUST} model, image by image.",
                    ["method", "clean", "attacked", "points lost"], body)]
    if promises:
        tables.append(Table("What the fitting images say.", ["method", "it"], promises, is_text=True, collapsed=True))
    measured = {line.method.measured_as: line for line in lines}
    colors, numbers = model_colors(measured), {name: number for number, name in enumerate(measured)}
    marks = [Line.of([100 * line.clean.value], [line.attacked], colors[name], name, bars=True, linestyle="",
                     marker=MARKERS[numbers[name] % len(MARKERS)]) for name, line in measured.items()]
    chart = Chart("compared-rules", "Attacked accuracy against clean accuracy of every method", [Panel(marks)],
                  x_label="clean accuracy, %", y_label="attacked accuracy, %", height=3.4)
    return Section("Rules compared", prose, tables, [chart])
