"""Certified accuracy against radius, and what else a certification has found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equipoise.certification import radii
from equipoise.core import stats
from equipoise.core.records import Row
from equipoise.reporting import numbers, style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Radii = NDArray[np.float64]  # (N,) certified radius of every image, 0 where it is wrong or abstained
GRID = 81


def certified(view: RunView) -> Section | None:
    """Certified accuracy of every model as the radius grows, with the table behind it."""
    curves = found(view.rows)
    if not curves:
        return None
    papers = {model: paper(view.rows, model, sigma_of(view)) for model in curves}
    n = sorted({len(reach) for reach in curves.values()})
    failure = view.identity.get("plan", {}).get("failure")
    prose = [f"An image counts at a radius if the model answers it rightly and no change of that Euclidean length, "
             f"in units of [0, 1] pixels, can alter the answer. Each certificate may be wrong with probability "
             f"{failure:g}; bands are exact 95 % intervals over n = {n[-1]} images."]
    if any(len(curve) for curve in papers.values()):
        prose.append("Dotted: the radii of Theorem A.2 from the same bounds, which ours never fall below. The radii "
                     "speak of the smoothed model's class, so the curve does not start at the clean accuracy.")
    prose += _checked(view.results)
    alt = "Certified accuracy against radius of " + " and ".join(curves)
    picture = Picture("certified", alt, lambda palette: draw(palette, curves, papers))
    tables = [_table(view.results), *_confidences(view.results)]
    return Section("Certified accuracy", prose, tables, [picture, *_ratios(view.rows)])


def found(rows: Sequence[Row]) -> dict[str, Radii]:
    """Radii by model; a model that appears at several alphas is one curve each."""
    seen: dict[str, list[float]] = {}
    for row in rows:
        if row["attack"] == "certify":
            seen.setdefault(named(row), []).append(row["radius"] if row["correct"] else 0.0)
    return {name: np.array(reach) for name, reach in seen.items()}


def paper(rows: Sequence[Row], name: str, sigma: float) -> Radii:
    """The paper's radii of a mixture from the same lower bounds; empty for a model that is none."""
    own = [row for row in rows if row["attack"] == "certify" and named(row) == name and "alpha" in row]
    lower = np.array([row["lower"] for row in own])
    if not len(own):
        return lower
    reach = radii.paper(lower, 1 - lower, own[0].get("sigma", sigma), own[0]["alpha"])
    return np.where([row["top"] == row["label"] for row in own], reach, 0.0)


def share_at(reach: Radii, at: Radii) -> list[stats.Estimate]:
    """Certified accuracy at each radius; at zero, any certificate counts."""
    return [stats.clopper_pearson(int((reach >= max(r, 1e-12)).sum()), len(reach)) for r in at]


def draw(palette: Palette, curves: dict[str, Radii], papers: dict[str, Radii]) -> Figure:
    """One curve per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.3))
    axes = figure.subplots()
    longest = max(float(reach.max(initial=0.0)) for reach in curves.values())
    at, called = np.linspace(0, max(1.05 * longest, 0.1), GRID), style.short(curves)
    for (name, reach), colour in zip(curves.items(), palette.of(curves).values(), strict=True):
        shares = share_at(reach, at)
        axes.fill_between(at, [100 * e.low for e in shares], [100 * e.high for e in shares], color=colour,
                          alpha=0.14, linewidth=0, step="pre")
        axes.step(at, [100 * e.value for e in shares], where="pre", color=colour, label=called[name])
        if len(theirs := papers.get(name, np.array([]))):
            axes.step(at, [100 * e.value for e in share_at(theirs, at)], where="pre", color=colour, linestyle=":",
                      label="_paper")
    axes.set(xlim=(0, at[-1]), ylim=(0, 103), xlabel="ℓ2 radius", ylabel="certified and right, %")
    axes.legend(loc="upper right", labelcolor=palette.ink)
    return figure


def _table(results: Sequence[Row]) -> Table:
    """ACR, certified accuracies, abstentions and cost by model."""
    shown = ("acr", "abstained", "clean", "clean-estimate", "samples")
    rows = [row for row in results if row["metric"] in shown or row["metric"].startswith("certified@")]
    return _grid("Average certified radius (ACR, wrong or abstained counts as 0), certified accuracy per radius, "
                 "abstentions, clean accuracy of the smoothed answer (of a mixture also as estimated without "
                 "abstaining), and noisy copies per image, with 95 % "
                 "intervals.", rows)


def _grid(caption: str, rows: Sequence[Row], *, folded: bool = False) -> Table:
    """A line per metric, a column per model."""
    models = list(dict.fromkeys(named(row) for row in rows))
    at = {(named(row), row["metric"]): row for row in rows}
    body = [[Cell(metric), *(_cell(at.get((model, metric))) for model in models)]
            for metric in dict.fromkeys(row["metric"] for row in rows)]
    return Table(caption, ["metric", *models], body, folded=folded)


def _cell(row: Row | None) -> Cell:
    if row is None:
        return Cell("–")
    if row["metric"] in ("acr", "samples", "ratio"):
        digits = 0 if row["metric"] == "samples" else 3
        return Cell(f"{row['value']:.{digits}f}", f"[{row['low']:.{digits}f}, {row['high']:.{digits}f}]")
    return Cell(numbers.percent(row["value"]), numbers.interval(row["low"], row["high"]))


def _checked(results: Sequence[Row]) -> list[str]:
    """What the attacks inside the radii have found."""
    said = []
    for row in results:
        if "broken" in row:
            end = "as the failure probability allows" if row["sound"] else "more than the failure probability allows"
            attack = row["metric"].removeprefix("broken-")
            said.append(f"Cross-check: the attack {attack} inside the certified radii of {named(row)} broke "
                        f"{row['broken']} of {row['n']} certificates (allowed: {row['allowed']}), {end}.")
    return said


def _confidences(results: Sequence[Row]) -> list[Table]:
    """True-class and best wrong-class confidence as the attack grows, where a run has looked."""
    rows = [row for row in results if row["metric"].startswith(("true@", "off@")) or row["metric"] == "ratio"]
    return [_grid("Share of votes for the true class and for the best other class under attacks of growing ℓ2 radius, "
                  "and the mean equal-confidence mixing ratio: estimates.", rows, folded=True)] if rows else []


def _ratios(rows: Sequence[Row]) -> list[Picture]:
    """Equal-confidence mixing ratios [SmoothMix, Figure 3], where a run has looked."""
    seen: dict[str, list[float]] = {}
    for row in rows:
        if row.get("ratio") is not None:
            seen.setdefault(row["model"], []).append(row["ratio"])
    alt = "Histograms of equal-confidence mixing ratios, estimates, of " + " and ".join(seen)
    return [Picture("mixing-ratios", alt, lambda palette: draw_ratios(palette, seen))] if seen else []


def draw_ratios(palette: Palette, seen: dict[str, list[float]]) -> Figure:
    """How far towards its adversarial image each image keeps its class; further right is better calibrated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 2.4))
    axes, called = figure.subplots(), style.short(seen)
    for (name, ratios), colour in zip(seen.items(), palette.of(seen).values(), strict=True):
        axes.hist(ratios, bins=np.linspace(0, 1, 21).tolist(), histtype="step", linewidth=1.4, color=colour,
                  label=f"{called[name]} (n = {len(ratios)})", density=True)
    axes.set(xlim=(0, 1), xlabel="equal-confidence mixing ratio (estimate)", ylabel="density of images")
    axes.legend(loc="upper right", labelcolor=palette.ink)
    return figure


def named(row: Row) -> str:
    """A model as the page calls it: with its alpha, where it is a mixture."""
    return f"{row['model']} (alpha {row['alpha']:.4g})" if "alpha" in row else str(row["model"])


def sigma_of(view: RunView) -> float:
    """Of runs whose rows do not tell."""
    return float(view.identity["plan"]["sigma"])
