"""The trade-off of mixtures with and without a gate, and who leads at equal accuracy under attack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.core.records import Row
from equipoise.reporting import numbers, style
from equipoise.reporting.gate import JOINT, KINDS, looks, named, part_of
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gate_trade_off(view: RunView) -> Section | None:
    """Clean accuracy against adversaries C and D: lines of mixtures without a gate, and where the gates lie."""
    parts = [part for name in ("trade-off", "trade-off-gates") if (part := part_of(view, name)) is not None]
    if not parts:
        return None
    chosen = {kind: f"{told['keep']:g}" for kind, told in view.summary.get("matched", {}).items()}
    points: dict[str, list[tuple[str, Row, Row]]] = {}
    for part in (view, *parts):
        by = {(row["model"], row["metric"]): row for row in [*part.results, *part.summary["joint"]]}
        for model in named(part.results):
            kind, _, share = (model, "", chosen.get(model, "")) if part is view else model.rpartition(", ")
            if kind in KINDS and (model, JOINT) in by:
                points.setdefault(kind, []).append((share, by[model, "clean"], by[model, JOINT]))
    points = {kind: sorted(points[kind], key=lambda held: held[1]["value"]) for kind in KINDS if kind in points}
    prose = ["Every kind of mixture at shares of the robust model's accuracy that it was chosen to keep on held-out "
             f"images, here on n = {parts[0].results[0]['n']} others under the lists of C and D. A kind is better "
             "where it lies further up and right; bars are exact 95 % intervals.", *_leads(view)]
    body = [[Cell(f"{kind}, keeps {share}"), *(Cell(numbers.percent(row["value"]), numbers.interval(
        row["low"], row["high"])) for row in rows)] for kind, held in points.items() for share, *rows in held]

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.4))
        axes = figure.subplots()
        for kind, look in looks(palette, points).items():
            held = [lowered for _, _, lowered in points[kind]]
            spread = [[100 * abs(row["value"] - row[end]) for row in held] for end in ("low", "high")]
            axes.errorbar([100 * clean["value"] for _, clean, _ in points[kind]], [100 * row["value"] for row in held],
                          yerr=spread, label=kind, elinewidth=0.6, capsize=2, **look)
        axes.set(xlabel="clean images answered rightly, %", ylabel="under C and D, %")
        axes.legend(labelcolor=palette.ink)
        return figure

    return Section("The trade-off under C and D", prose,
                   [Table("Images answered rightly.", ["mixture", "clean", JOINT], body)],
                   [Picture("gate-trade-off", "Accuracy under C and D against clean accuracy", draw)])


def _leads(view: RunView) -> list[str]:
    """Who answers more clean images at equal accuracy under C and D."""
    found: list[Row] = view.summary.get("leads", [])
    if not found:
        return []
    told = "; ".join(f"{row['model']} against {row['versus']} {numbers.points(row['value'])} "
                     f"({numbers.points(row['low'])} to {numbers.points(row['high'])})" for row in found)
    return ["At its own accuracy under C and D, clean accuracy of each gate less that of the lines (straight between "
            f"their points), in percentage points with 95 % intervals over images: {told}."]
