"""Accuracy against the radius of the attack, from one search for the smallest perturbations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equipoise.core import format
from equipoise.core.radius_curves import RadiusCurve
from equipoise.core.threat import SIGNS
from equipoise.reporting.charts import CORRECT, Chart, Line, Panel, model_colors, percent_range
from equipoise.reporting.section import SAME_NUMBERS, Cell, RunView, Section, Table, model_cell


def radius_curves(run: RunView) -> Section | None:
    """The curve of every model, its median radius, and how many images have which kind of
    radius."""
    curves = run.summary.radius_curves
    if not curves:
        return None
    largest = format.radius(curves[0].points[-1].radius, curves[0].norm)
    prose = [
        "The radius of an image is the norm of the smallest perturbation that was found to change its class: 0 if "
        f"it is misclassified already, none if nothing up to {largest} changes it. Accuracy at a radius is the "
        "share of images with a larger radius or none.",
        "Radii are upper bounds: every one belongs to an image that the model misclassifies. A stronger search "
        f"can only lower the curve. Bands are exact 95 % intervals, each for one radius; "
        f"n = {format.counts(curve.n for curve in curves)} images.",
    ]
    models = [curve.model for curve in curves]
    names, colors = {model: run.name(model) for model in models}, model_colors(models)
    return Section(
        "Accuracy against radius",
        prose,
        [_counts(curves, names, largest), _points(curves, names)],
        [chart(curves, names, colors)],
    )


def chart(
    curves: Sequence[RadiusCurve], names: Mapping[str, str], colors: Mapping[str, str]
) -> Chart:
    """All curves, which have one norm; names and colours are by model."""
    norm, largest = curves[0].norm, max(curve.points[-1].radius for curve in curves)
    unit = 255 if norm == "linf" else 1
    lines = [
        Line.of(
            [unit * point.radius for point in curve.points],
            curve.points,
            colors[curve.model],
            names[curve.model],
            marker="",
        )
        for curve in curves
    ]
    label = f"{SIGNS[norm]} radius{', in 1/255 of the range' if unit == 255 else ''}"
    return Chart(
        "radius-curves",
        f"Accuracy against radius of {' and '.join(names[model] for model in colors)}",
        [Panel(lines, x_range=(0, unit * largest), y_range=percent_range(lines))],
        x_label=label,
        y_label=CORRECT,
    )


def _counts(curves: tuple[RadiusCurve, ...], names: Mapping[str, str], largest: str) -> Table:
    body = [
        [
            model_cell(names[curve.model]),
            Cell(format.median_radius(curve)),
            Cell(str(curve.wrong)),
            Cell(str(curve.broken)),
            Cell(str(curve.survived)),
        ]
        for curve in curves
    ]
    return Table(
        "Median radius (half of the images are broken within it), and images by their radius.",
        ["model", "median", "radius 0", "broken", f"none up to {largest}"],
        body,
    )


def _points(curves: tuple[RadiusCurve, ...], names: dict[str, str]) -> Table:
    body = [
        [
            Cell(format.radius(points[0].radius, curves[0].norm)),
            *(Cell(format.percent(point.value), format.bounds(point)) for point in points),
        ]
        for points in zip(*(curve.points for curve in curves), strict=True)
    ]
    return Table(
        f"{SAME_NUMBERS}.",
        ["radius", *(names[curve.model] for curve in curves)],
        body,
        collapsed=True,
    )
