"""Figures of several runs in one: trade-offs, accuracy against radius, certified accuracy, and
training curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import FitArrays
from equipoise.core.results import Result
from equipoise.core.rows import EpochRow, by_mixture
from equipoise.reporting import radius_curves
from equipoise.reporting.certificates import CERTIFIED, LINE_STYLES, certified_accuracy, radius_axis
from equipoise.reporting.charts import CORRECT, Chart, Line, Panel
from equipoise.reporting.mixture_fit import gains
from equipoise.reporting.paired_runs import NamedRun
from equipoise.reporting.provenance import CURVES
from equipoise.reporting.section import Section

MARKERS = "osD^vPX*<>"


def sections(runs: Sequence[NamedRun]) -> list[Section]:
    """All figures that at least one of the runs has something for."""
    return [
        section
        for function in (trade_off, radii, certified, training)
        if (section := function(runs)) is not None
    ]


def trade_off(runs: Sequence[NamedRun]) -> Section | None:
    """Attacked accuracy against clean accuracy of every model: colour is the run, shape the
    model."""
    shapes, markers, lines = cycle(MARKERS), dict[str, str](), []
    threats = {item.number: item.run.threat for item in runs}
    name_threat = len(set(threats.values())) > 1
    for item in runs:
        for model in dict.fromkeys(name for name, _ in item.models):
            points = _points(item, model)
            if not points:
                continue
            if model not in markers:
                markers[model] = next(shapes)
            x, y = [100 * clean.value for clean, _ in points], [attacked for _, attacked in points]
            threat = f" ({threats[item.number]})" if name_threat else ""
            label = f"{item.name}{threat}, {format.short_names([model])[model]}"
            low, high = (
                [100 * getattr(clean, end) for clean, _ in points] for end in ("low", "high")
            )
            lines.append(
                Line.of(
                    x,
                    y,
                    item.color,
                    label,
                    bars=True,
                    marker=markers[model],
                    width=1.0,
                    x_low=low,
                    x_high=high,
                    linestyle=item.linestyle if len(points) > 1 else "",
                )
            )
        lines += _frontier(item)
    if not lines:
        return None
    ends = [value for line in lines for value in (*line.x, *line.x_low, *line.x_high)]
    panel = Panel(lines, x_range=(min(ends) - 1, max(ends) + 1))  # intervals included
    chart = Chart(
        "trade-off",
        "Attacked accuracy against clean accuracy of every model of every run",
        [panel],
        x_label="clean accuracy, %",
        y_label="attacked accuracy, %",
        height=3.6,
    )
    prose = [
        "Measured clean and worst-case accuracy of every model, with exact 95 % intervals in both directions. "
        "Colour is the run, shape the model; a line joins several alphas of one mixture."
    ]
    if runs[0].run.summary.command == "fit":
        prose.append(
            "All points are of fitting images: attacked accuracies of the mixtures are what their targets "
            "allow. Dashed: the mixtures of each fit that may lose more and more, from the same images."
        )
    if name_threat:
        prose.append(
            "The runs have other threats, so heights of different colours cannot be compared."
        )
    return Section("Trade-off", prose, pictures=[chart])


def _points(item: NamedRun, model: str) -> list[tuple[Result, Result]]:
    """Clean and worst-case accuracy of a model, or of a mixture at each of its alphas in order."""
    results = {
        (result.alpha, result.metric): result
        for result in item.run.summary.results
        if result.model == model
    }
    alphas = sorted(
        {alpha for alpha, _ in results}, key=lambda alpha: (alpha is not None, alpha or 0.0)
    )
    return [
        (results[alpha, CLEAN], results[alpha, WORST])
        for alpha in alphas
        if (alpha, CLEAN) in results and (alpha, WORST) in results
    ]


def _frontier(item: NamedRun) -> list[Line]:
    """Of a fit: the mixtures that may lose more and more."""
    arrays = FitArrays.load(item.run.folder) if item.run.summary.command == "fit" else None
    if arrays is None or arrays.map_curve is None:
        return []
    clean, attacked = (100 * gains(arrays.map_curve)).T.tolist()
    return [
        Line(
            x=clean,
            y=attacked,
            color=item.color,
            label=f"{item.name}, fitted frontier",
            linestyle="--",
            marker="",
            width=1.2,
        )
    ]


def radii(runs: Sequence[NamedRun]) -> Section | None:
    """Accuracy against the radius of the attack, of runs with one norm."""
    curves = [(item, curve) for item in runs for curve in item.run.summary.radius_curves]
    if not curves:
        return None
    if len({curve.norm for _, curve in curves}) > 1:
        return Section(
            "Accuracy against radius",
            [
                "The runs have radii in different norms, which cannot be drawn in "
                "one figure; see their reports."
            ],
        )
    labelled = [
        replace(curve, model=f"{item.name}, {format.short_names([curve.model])[curve.model]}")
        for item, curve in curves
    ]
    colors = {curve.model: item.color for curve, (item, _) in zip(labelled, curves, strict=True)}
    return Section(
        "Accuracy against radius",
        [
            "Share of images that no perturbation up to a radius was found to "
            "break, with exact 95 % intervals; radii are upper bounds."
        ],
        pictures=[radius_curves.chart(labelled, {name: name for name in colors}, colors)],
    )


def certified(runs: Sequence[NamedRun]) -> Section | None:
    """Certified accuracy of every model against the radius; not of runs that decided a single
    radius."""
    curves = [
        (item, mixture, np.array([row.radius if row.correct else 0.0 for row in rows]))
        for item in runs
        for mixture, rows in by_mixture(item.run.rows).items()
        if "decide_radius" not in (item.run.identity.get("plan") or {})
    ]
    if not curves:
        return None
    at = radius_axis(max(float(own.max(initial=0.0)) for *_, own in curves))
    lines = []
    for item, mixture, own in curves:
        names = format.mixture_names(by_mixture(item.run.rows))
        style = LINE_STYLES[list(names).index(mixture) % len(LINE_STYLES)]
        lines.append(
            Line.of(
                at.tolist(),
                certified_accuracy(own, at),
                item.color,
                f"{item.name}, {names[mixture]}",
                marker="",
                steps=True,
                linestyle=style,
            )
        )
    chart = Chart(
        "certified",
        "Certified accuracy against radius of every run",
        [Panel(lines, x_range=(0, float(at[-1])), y_range=(0, 103))],
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
    )
    return Section(
        "Certified accuracy",
        [
            "Share of images that are classified correctly with a certified radius of at "
            "least this Euclidean length, in units of [0, 1] pixels. Bands are exact "
            "95 % intervals."
        ],
        pictures=[chart],
    )


def training(runs: Sequence[NamedRun]) -> Section | None:
    """Loss and accuracies of every epoch of every run."""
    epochs = {
        item.number: [row for row in item.run.rows if isinstance(row, EpochRow)] for item in runs
    }
    if not any(epochs.values()):
        return None
    names = [
        name
        for name in CURVES
        if any(name in _accuracies(row) for rows in epochs.values() for row in rows)
    ]
    panels = [
        Panel(
            [_curve(item, [(row.index, row.loss) for row in epochs[item.number]]) for item in runs],
            y_label="loss",
        )
    ]
    panels += [
        Panel(
            [
                _curve(
                    item,
                    [
                        (row.index, 100 * _accuracies(row)[name])
                        for row in epochs[item.number]
                        if name in _accuracies(row)
                    ],
                )
                for item in runs
            ],
            title=CURVES[name][0],
            y_label=CORRECT,
        )
        for name in names
    ]
    chart = Chart(
        "training",
        f"Loss and accuracies over the epochs of {len(runs)} trainings",
        panels,
        x_label="epoch",
        height=1.0 + 1.7 * len(panels),
    )
    return Section(
        "Training",
        [
            "Losses of different objectives cannot be compared. Training accuracy is that on the "
            "inputs that the objective trains on; held-out images are never trained on."
        ],
        pictures=[chart],
    )


def _accuracies(row: EpochRow) -> dict[str, float]:
    return {**row.validation, "accuracy": row.accuracy}


def _curve(item: NamedRun, points: Sequence[tuple[int, float]]) -> Line:
    return Line(
        x=[index + 1 for index, _ in points],
        y=[value for _, value in points],
        color=item.color,
        label=item.name,
        linestyle=item.linestyle,
        marker="o" if len(points) < 30 else "",
    )
