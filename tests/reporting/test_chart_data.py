"""The numbers that the script draws figures from are those of the printed figures."""

from __future__ import annotations

import json

import numpy as np

from equipoise.reporting.chart_data import chart_data
from equipoise.reporting.charts import (
    Chart,
    Histogram,
    Line,
    Panel,
    Point,
    ReferenceLine,
    percent_range,
)


def test_all_marks_of_a_panel_are_numbers() -> None:
    panel = Panel(
        [
            Line(
                x=[0, 1],
                y=[2, np.nan],
                low=[1, np.nan],
                high=[3, np.nan],
                color="robust",
                label="a",
                linestyle="--",
            ),
            Histogram(values=[0.1, 0.2, 0.9], bins=[0, 0.5, 1], color="mixed", label="b"),
            ReferenceLine(x=0.0, text="c"),
            Point(x=1, y=2, text="d", color="accurate"),
        ],
        title="t",
        x_ticks={0.0: "zero"},
        y_range=(0, 3),
    )
    data = chart_data(Chart("name", "alt", [panel], x_label="x", y_label="y"))
    (own,) = json.loads(json.dumps(data, allow_nan=False))["panels"]
    assert (
        own["lines"][0]["y"] == [2, None]
        and own["lines"][0]["dash"] == "6 4"
        and "steps" not in own["lines"][0]
    )
    assert own["histograms"] == [
        {"edges": [0, 0.5, 1], "counts": [2, 1], "color": "mixed", "label": "b", "filled": True}
    ]
    assert own["references"] == [{"x": 0.0, "text": "c"}]  # zero is a place, not an empty value
    assert own["points"] == [{"x": 1, "y": 2, "text": "d", "color": "accurate"}]
    assert own["xTicks"] == [[0, "zero"]] and own["yRange"] == [0, 3]


def test_text_is_shown_literally() -> None:
    data = chart_data(
        Chart(
            "name", "a\x1bb", [Panel([Line(x=[0], y=[0], color="ink", label="\x00")])], x_label="x"
        )
    )
    assert "\x1b" not in json.dumps(data, ensure_ascii=False) and "\\u0000" not in json.dumps(data)


def test_an_axis_of_shares_is_as_long_as_its_curves() -> None:
    lines = [Line(x=[0, 1], y=[60, 62], low=[58, 60], high=[62, 64], color="ink")]
    assert percent_range(lines) == (57, 65)
    assert percent_range([Line(x=[0], y=[0], color="ink"), Line(x=[0], y=[100], color="ink")]) == (
        0,
        103,
    )
    assert percent_range([]) == (0, 103)
