"""Accuracy against alpha: the trade between clean and attacked images that the mixture offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.core.records import Row
from equipoise.reporting import numbers, style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = dict[str, list[Row]]  # metric → results in order of alpha


def accuracy_against_alpha(view: RunView) -> Section | None:
    """Clean and worst-case accuracy of the mixture at every alpha of the sub-run `sweep`."""
    sweep = view.sub("sweep")
    found = curves(sweep.results) if sweep else {}
    if not found:
        return None
    chosen = chosen_alpha(view)
    counts = sorted({row["n"] for rows in found.values() for row in rows})
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    prose = [f"Alpha is the weight of the robust model: at 0 the mixture is the accurate model, at 1 the robust one. "
             f"Every point is the mixture at one alpha on n = {n} images; bands are exact 95 % intervals."]
    if "promise" in view.summary:
        prose.append("This is plain mixing, without the fitted map, on fitting images and under a short attack: what "
                     "can be had by turning one number.")
    if chosen is not None:
        prose.append(f"The vertical line marks the alpha of this run, {chosen:g}.")
    alt = "Accuracy of the mixture against alpha, " + " and ".join(found)
    picture = Picture("alpha", alt, lambda palette: draw(palette, found, chosen))
    return Section("Accuracy against alpha", prose, [_table(found)], [picture])


def curves(results: list[Row]) -> Curves:
    """Results of the mixture that carry an alpha, by metric and in order of alpha."""
    own = sorted((r for r in results if r["model"] == "mixed" and "alpha" in r), key=lambda row: row["alpha"])
    found = {metric: [row for row in own if row["metric"] == metric] for metric in ("clean", "worst")}
    return {metric: rows for metric, rows in found.items() if rows}


def chosen_alpha(view: RunView) -> float | None:
    """The alpha that the run was asked for, or chose and told in its summary."""
    attack = view.identity.get("attack", {})
    for table in (attack if isinstance(attack, dict) else {}, view.summary):
        if isinstance(alpha := table.get("alpha"), int | float):
            return float(alpha)
    return None


def draw(palette: Palette, found: Curves, chosen: float | None) -> Figure:
    """Both curves in the mixture's colour: clean is solid, worst is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.3))
    axes = figure.subplots()
    if chosen is not None:
        axes.axvline(chosen, color=palette.muted, linewidth=0.9, linestyle=(0, (1, 2)), label="_chosen")
    looks = {"clean": ("-", palette.mixed), "worst": ("--", palette.paper)}
    for metric, rows in found.items():
        line, face = looks[metric]
        alphas = [row["alpha"] for row in rows]
        low, value, high = ([100 * row[key] for row in rows] for key in ("low", "value", "high"))
        axes.fill_between(alphas, low, high, color=palette.mixed, alpha=0.16, linewidth=0)
        axes.plot(alphas, value, line, color=palette.mixed, marker="o", markerfacecolor=face, label=metric)
    axes.set(xlim=(-0.02, 1.02), ylim=(0, 103), xlabel="alpha", ylabel="answered rightly, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2, labelcolor=palette.ink, handlelength=2.6)
    return figure


def _table(found: Curves) -> Table:
    alphas = sorted({row["alpha"] for rows in found.values() for row in rows})
    at = {(metric, row["alpha"]): row for metric, rows in found.items() for row in rows}
    body = [[Cell(f"{alpha:g}"), *(Cell(numbers.estimate(at[metric, alpha])) if (metric, alpha) in at else Cell("–")
                                   for metric in found)] for alpha in alphas]
    return Table("The same numbers as a table.", ["alpha", *found], body, folded=True)
