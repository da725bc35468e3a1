"""What the script of a report draws a chart from: the same marks as the printed figure, as plain
numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from equipoise.core.text import literal
from equipoise.reporting.charts import (
    Chart,
    Histogram,
    Line,
    LineStyle,
    Panel,
    Point,
    ReferenceLine,
)

DIGITS = 6  # of every number
DASHES = {"-": "", "--": "6 4", ":": "2 3", "-.": "8 3 2 3"}


def chart_data(chart: Chart) -> dict[str, Any]:
    """The panels of a chart with their lines, histograms, reference lines and points; fields
    without a value left out.

    >>> chart_data(Chart("a", "", [Panel([Line(x=[0], y=[1 / 3], color="ink")])], x_label="x"))["panels"]
    [{'lines': [{'x': [0.0], 'y': [0.333333], 'color': 'ink', 'marker': 'o', 'width': 1.8}]}]
    """
    return _without_empty(
        {
            "name": chart.name,
            "alt": literal(chart.alt),
            "xLabel": chart.x_label,
            "yLabel": chart.y_label,
            "beside": chart.side_by_side,
            "height": chart.height,
            "panels": [_panel(panel) for panel in chart.panels],
        }
    )


def _panel(panel: Panel) -> dict[str, Any]:
    ticks = (
        None
        if panel.x_ticks is None
        else [[_number(at), literal(text)] for at, text in panel.x_ticks.items()]
    )
    return _without_empty(
        {
            "title": literal(panel.title),
            "titleColor": panel.title_color if panel.title else "",
            "yLabel": panel.y_label,
            "xRange": _numbers(panel.x_range or ()),
            "yRange": _numbers(panel.y_range or ()),
            "xTicks": ticks,
            "lines": [_line(mark) for mark in panel.marks if isinstance(mark, Line)],
            "histograms": [_histogram(mark) for mark in panel.marks if isinstance(mark, Histogram)],
            "references": [
                _without_empty(
                    {
                        "x": mark.x,
                        "y": mark.y,
                        "text": literal(mark.text),
                        "interval": _numbers(mark.interval or ()),
                    }
                )
                for mark in panel.marks
                if isinstance(mark, ReferenceLine)
            ],
            "points": [
                {
                    "x": _number(mark.x),
                    "y": _number(mark.y),
                    "text": literal(mark.text),
                    "color": mark.color,
                }
                for mark in panel.marks
                if isinstance(mark, Point)
            ],
        }
    )


def _line(line: Line) -> dict[str, Any]:
    return _without_empty(
        {
            "x": _numbers(line.x),
            "y": _numbers(line.y),
            "low": _numbers(line.low),
            "high": _numbers(line.high),
            "xLow": _numbers(line.x_low),
            "xHigh": _numbers(line.x_high),
            "color": line.color,
            "label": literal(line.label),
            "dash": _dash(line.linestyle),
            "marker": line.marker,
            "width": line.width,
            "opacity": line.opacity if line.opacity < 1 else None,
            "steps": line.steps,
            "bars": line.bars,
            "texts": [literal(text) for text in line.texts],
        }
    )


def _histogram(histogram: Histogram) -> dict[str, Any]:
    counts, edges = np.histogram(
        histogram.values, bins=list(histogram.bins), density=histogram.density
    )
    return _without_empty(
        {
            "edges": _numbers(edges.tolist()),
            "counts": _numbers(counts.tolist()),
            "color": histogram.color,
            "label": literal(histogram.label),
            "filled": histogram.filled,
            "dash": _dash(histogram.linestyle),
        }
    )


def _dash(style: LineStyle) -> str:
    return (
        DASHES.get(style, "")
        if isinstance(style, str)
        else " ".join(f"{2 * part:g}" for part in style[1])
    )


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    """Rounded; JSON has no infinite numbers."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if value is not None and value is not False and value not in ("", [])
    }
