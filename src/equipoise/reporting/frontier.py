"""Mixtures of one clean accuracy: certified accuracy as alpha and sigma vary together [Bai2024, Figures 6 and 7]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.certification import mixture
from equipoise.reporting import numbers, style
from equipoise.reporting.certified import GRID, named, sigma_of
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Mixtures = dict[str, tuple[mixture.Base, float]]  # by name: base and alpha
TITLES = {"3.5": "Theorem 3.5, as in the paper's Figure 6", "A.2": "Theorem A.2, as in the paper's Figure 7",
          "ours": "ours, from the same bounds"}


def frontier(view: RunView) -> Section | None:
    """What each alpha was chosen for, and the best mixture at every radius."""
    told = view.summary.get("chosen")
    if not told:
        return None
    mixtures = collect(view)
    prose = [f"Every smoothed model is mixed with the same accurate one, at the largest alpha with which the mixture "
             f"was estimated to answer {numbers.percent(told[0]['wanted'])} of n = {told[0]['n']} other clean images "
             f"rightly. More noise certifies further and answers worse; a smaller alpha makes up for it.",
             "Solid: mixtures. Dashed: their smoothed models alone, from the same votes. Grey: the best mixture at "
             "each radius, which is the best on these very images. All three theorems are given the same confidence "
             "bounds, where the paper inserts means."]
    alt = "Certified accuracy against radius by three theorems, for " + " and ".join(mixtures)
    return Section("Alpha and sigma at one clean accuracy", prose, [_chosen(view), _points(view)],
                   [Picture("frontier", alt, lambda palette: draw(palette, mixtures))])


def collect(view: RunView) -> Mixtures:
    """Bases and alphas of the certified mixtures, in the order of the choice."""
    found: Mixtures = {}
    for row in view.summary["chosen"]:
        own = [each for each in view.rows if each["attack"] == "certify" and each["model"] == row["model"]]
        found[named(row)] = (mixture.Base.of_rows(own, sigma_of(view)), float(row["alpha"]))
    return found


def draw(palette: Palette, mixtures: Mixtures) -> Figure:
    """A panel per theorem on common axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 6.4))
    panels = figure.subplots(len(TITLES), 1, sharex=True)
    longest = max(float(base.radius(1.0).max(initial=0.0)) for base, _ in mixtures.values())
    at = np.linspace(0, max(1.05 * longest, 0.1), 2 * GRID)
    wanted, called = np.maximum(at, 1e-300), style.short(mixtures)
    for axes, (theorem, title) in zip(panels, TITLES.items(), strict=True):
        best, _ = mixture.frontier(list(mixtures.values()), at, theorem)
        axes.step(at, 100 * best, where="pre", color=palette.muted, alpha=0.35, linewidth=5, label="best mixture")
        for (name, (base, alpha)), colour in zip(mixtures.items(), palette.of(mixtures).values(), strict=True):
            for weight, line, width in ((alpha, "-", 1.6), (1.0, "--", 1.0)):
                reach = base.radius(weight, theorem)
                axes.step(at, 100 * (reach[:, None] >= wanted).mean(axis=0), where="pre", color=colour,
                          linestyle=line, linewidth=width, label=called[name] if line == "-" else "_alone")
        axes.set_title(title, loc="left", color=palette.ink)
        axes.set(xlim=(0, at[-1]), ylim=(0, 103))
    panels[0].legend(loc="upper right", labelcolor=palette.ink)
    panels[-1].set_xlabel("ℓ2 radius")
    figure.supylabel("certified and right, %", fontsize=9, color=palette.muted)
    return figure


def _chosen(view: RunView) -> Table:
    body = [[Cell(row["model"]), Cell(f"{row['sigma']:g}"), Cell(f"{row['alpha']:.4g}"),
             Cell(numbers.percent(row["clean-estimate"]), numbers.interval(row["low"], row["high"]))]
            for row in view.summary["chosen"]]
    return Table("Alpha as chosen, and the estimated clean accuracy on the images that chose it.",
                 ["model", "sigma", "alpha", "clean, estimate"], body)


def _points(view: RunView) -> Table:
    body = [[Cell(f"{row['radius']:.2f}"), Cell(numbers.percent(row["value"]), numbers.interval(row["low"],
             row["high"])), Cell(f"{row['sigma']:g}"), Cell(f"{row['alpha']:.4g}")] for row in view.summary["frontier"]]
    return Table("The best mixture at each radius, with exact 95 % intervals that do not know of the choice.",
                 ["radius", "certified and right", "sigma", "alpha"], body)
