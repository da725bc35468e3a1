"""What a search of the ball suggests about a robust model inside a mixture: estimates, never certificates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.core.records import Row
from equipoise.reporting import style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By the metrics of `summary.json`: what the share is judged by, and how it is drawn.
KINDS = {"kept@": ("by the Lipschitz estimate", "-"), "attacked-kept@": ("at attacked images", "--")}
Curves = dict[tuple[str, str], list[tuple[float, Row]]]  # model and kind → alpha and share


def estimates(view: RunView) -> Section | None:
    """Local Lipschitz constants [Bai2024, (C.1)], and the share of images whose margin outweighs any accurate model."""
    sub = view.sub("estimate")
    if sub is None:
        return None
    curves = collect(sub.results)
    constants = {row["model"]: row for row in sub.results if row["metric"] == "lipschitz"}
    first = next(iter(constants.values()))
    prose = [f"A search by gradients in the ball ({view.threat}) of every one of n = {first['n']} images finds how far "
             f"the probability of the predicted class falls and how far each other one rises; per unit of radius and "
             f"averaged over classes, that is the local Lipschitz constant.",
             "A mixture keeps the robust model's answer where the margin that is left is at least (1 − alpha) / alpha. "
             "The search may have missed the worst, so these are estimates and no certificates; the Lipschitz estimate "
             "lets all classes be at their worst at once, the attacked images are single points."]
    body = [[Cell(model), *(_number(sub.results, model, metric) for metric in ("lipschitz", "margin",
                                                                              "attacked-margin"))]
            for model in constants]
    table = Table("Mean over images with 95 % intervals: local Lipschitz constant, least margin in the ball by it, and "
                  "least margin under the attacks of this run. Estimates.",
                  ["model", "constant", "margin", "attacked margin"], body)
    alt = "Estimated share of images that a mixture keeps against alpha, for " + " and ".join(constants)
    return Section("Estimated margins", prose, [table],
                   [Picture("estimates", alt, lambda palette: draw(palette, curves))])


def collect(results: Sequence[Row]) -> Curves:
    """Shares by alpha."""
    found: Curves = {}
    for row in results:
        kind, _, alpha = row["metric"].rpartition("@")
        if f"{kind}@" in KINDS:
            found.setdefault((row["model"], f"{kind}@"), []).append((float(alpha), row))
    return found


def draw(palette: Palette, curves: Curves) -> Figure:
    """A colour per model, a line per kind, bands for the intervals over images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.0))
    axes = figure.subplots()
    colours = palette.of(dict.fromkeys(model for model, _ in curves))
    called = style.short(colours)
    for (model, kind), points in curves.items():
        at = [alpha for alpha, _ in points]
        words, line = KINDS[kind]
        axes.fill_between(at, [100 * row["low"] for _, row in points], [100 * row["high"] for _, row in points],
                          color=colours[model], alpha=0.12, linewidth=0)
        axes.plot(at, [100 * row["value"] for _, row in points], line, marker="o", color=colours[model],
                  label=f"{called[model]}, {words}")
    axes.set(ylim=(0, 103), xlabel="alpha", ylabel="right and kept, %: estimates")
    axes.legend(loc="upper left", labelcolor=palette.ink)
    return figure


def _number(results: Sequence[Row], model: str, metric: str) -> Cell:
    row = next((row for row in results if (row["model"], row["metric"]) == (model, metric)), None)
    if row is None:
        return Cell("–")
    return Cell(f"{row['value']:.3f}".replace("-", "−"), f"[{row['low']:.3f}, {row['high']:.3f}]".replace("-", "−"))
