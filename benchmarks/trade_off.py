"""Draw the figure of the README: clean against robust accuracy of an accurate model, a robust one
and their mixture, with exact 95 % intervals, from kept rows.

    python benchmarks/trade_off.py [--rows ROWS] [--out docs/images]

writes trade-off.svg and trade-off-dark.svg, and prints the table.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise.core import stats
from equipoise.core.stats import Estimate

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "experiments" / "rules" / "rows" / "cifar10-9000.csv.gz"
NAMES = {"accurate": "accurate", "robust": "robust", "confidence switch": "mixture"}  # in the rows
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "accurate": "#0072b2",
    "robust": "#d55e00",
    "mixture": "#009e73",
}
DARK = {
    "paper": "#15181c",
    "ink": "#e4e7eb",
    "accurate": "#56b4e9",
    "robust": "#f28e4b",
    "mixture": "#3cc79a",
}


@dataclass(frozen=True)
class Point:
    """Clean and robust accuracy of one model on the same images."""

    model: str
    clean: Estimate
    robust: Estimate


def read_points(path: Path) -> list[Point]:
    """The three models, counted from the rows of their images."""
    images: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
    clean: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
    robust: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            model = NAMES[row["model"]]
            images[model] += 1
            clean[model] += int(row["clean"])
            robust[model] += int(row["attacked"])
    points = []
    for model, n in images.items():
        clean_accuracy = stats.clopper_pearson(clean[model], n)
        robust_accuracy = stats.clopper_pearson(robust[model], n)
        points.append(Point(model, clean_accuracy, robust_accuracy))
    return points


def draw(points: list[Point], palette: dict[str, str]) -> Figure:
    """One point per model, with its intervals in both directions and its name beside it."""
    figure = Figure(figsize=(7.2, 3.9), layout="constrained", facecolor=palette["paper"])
    axes = figure.add_subplot(facecolor=palette["paper"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette["ink"])
    axes.tick_params(colors=palette["ink"])
    for point in points:
        _draw_point(axes, point, palette)
    axes.set_xlim(79, 98)
    axes.set_ylim(-4, 56)
    axes.set_xlabel("clean accuracy, %", color=palette["ink"])
    axes.set_ylabel("robust accuracy, %", color=palette["ink"])
    return figure


def _draw_point(axes: Axes, point: Point, palette: dict[str, str]) -> None:
    color = palette[point.model]
    x, y = 100 * point.clean.value, 100 * point.robust.value
    axes.hlines(y, 100 * point.clean.low, 100 * point.clean.high, color=color, linewidth=1.5)
    axes.vlines(x, 100 * point.robust.low, 100 * point.robust.high, color=color, linewidth=1.5)
    axes.plot(x, y, marker="o", markersize=5, color=color)
    axes.annotate(
        f"{point.model}\n{x:.1f} / {y:.1f}",
        (x, y),
        xytext=(22, 0),
        textcoords="offset points",
        verticalalignment="center",
        color=color,
        fontweight="bold" if point.model == "mixture" else "normal",
    )


def percent(estimate: Estimate) -> str:
    """An accuracy with its interval, such as `87.1 % [86.4, 87.8]`."""
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:.1f} % [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()

    points = read_points(args.rows)
    for point in points:
        print(f"| {point.model} | {percent(point.clean)} | {percent(point.robust)} |")
    for name, palette in (("trade-off", LIGHT), ("trade-off-dark", DARK)):
        path = args.out / f"{name}.svg"
        draw(points, palette).savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
