"""How a mixture was fitted: what was promised, margins before and after the map, the landscape, the trade-off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equipoise.reporting import numbers, style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
GROUPS = {"clean, right": ("clean", True), "clean, wrong": ("clean", False),
          "attacked, right": ("attacked", True), "attacked, wrong": ("attacked", False)}
BINS = 40


def promise(view: RunView) -> Section | None:
    """What the fit promises, and what was rejected on the way."""
    told = view.summary.get("promise")
    if not isinstance(told, str):
        return None
    seen = view.summary.get("fitted", {})
    helped = bool(view.summary.get("helped", True))
    prose = [f"The mixture {told}." if helped else f"{told[:1].upper()}{told[1:]}."]
    if helped and {"clean", "robust_clean"} <= seen.keys():
        prose.append(f"On the fitting images that did not choose the map it answers "
                     f"{numbers.percent(seen['clean'])} of the clean ones rightly, the robust model "
                     f"{numbers.percent(seen['robust_clean'])}. Fitting images are never evaluated on.")
    rejected = view.summary.get("rejected", {})
    body = [[Cell(reason), Cell(str(count))] for reason, count in rejected.items()]
    notes = [[Cell(note), Cell("")] for note in view.summary.get("notes", [])]
    tables = [Table("Candidates that were rejected.", ["reason", "candidates"], body)] if body else []
    if notes:
        tables.append(Table("On the way.", ["note", ""], notes, words=True, folded=True))
    return Section("What was fitted", prose, tables)


def mapped_margins(view: RunView) -> Section | None:
    """Histograms of the robust model's margins, before and after the map."""
    needed = [f"nuts_{kind}_{when}" for kind in ("clean", "attacked") for when in ("before", "after", "right")]
    if any(name not in view.arrays for name in [*needed, "nuts_q"]):
        return None
    held = {name: view.arrays[name] for name in needed}
    q = float(view.arrays["nuts_q"])
    medians = [[Cell(name), *(Cell(_median(held, name, when)) for when in ("before", "after"))] for name in GROUPS]
    n = len(held["nuts_clean_before"])
    prose = [f"The margin of the robust model is its first probability minus its second, here on the n = {n} fitting "
             f"images, clean and at the points where an attack made the margin of the true class smallest. The map "
             f"draws answers that are right under attack away from answers that are wrong on clean images: below the "
             f"line, at {q:.3g}, the accurate model may speak. Bars count single images, so they carry no interval."]
    table = Table("Median margins.", ["images", "before the map", "after the map"], medians)
    alt = "Histograms of the robust model's margins before and after the map, right and wrong, clean and attacked"
    return Section("Margins before and after the map", prose, [table],
                   [Picture("nuts-margins", alt, lambda palette: draw_margins(palette, held, q))])


def _group(held: dict[str, Array], name: str, when: str) -> Array:
    kind, right = GROUPS[name]
    chosen: Array = held[f"nuts_{kind}_{when}"][held[f"nuts_{kind}_right"] == right]
    return chosen


def _median(held: dict[str, Array], name: str, when: str) -> str:
    group = _group(held, name, when)
    return f"{np.median(group):.3f}" if len(group) else "–"


def draw_margins(palette: Palette, held: dict[str, Array], q: float) -> Figure:
    """Two panels on a common axis; right is in the robust colour, wrong in red, attacked is outlined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.6))
    panels = figure.subplots(2, 1, sharex=True)
    bins = np.linspace(0, 1, BINS + 1)
    for axes, when in zip(panels, ("before", "after"), strict=True):
        for name, (kind, right) in GROUPS.items():
            colour = palette.robust if right else palette.wrong
            look = {"alpha": 0.35} if kind == "clean" else {"histtype": "step", "linewidth": 1.4}
            axes.hist(_group(held, name, when), bins=bins, color=colour, label=name, **look)
        axes.set_title(f"{when} the map", loc="left", color=palette.ink)
        axes.locator_params(axis="y", nbins=3, integer=True)
    panels[1].axvline(q, color=palette.muted, linewidth=1.0, linestyle=(0, (1, 2)))
    panels[0].legend(loc="upper center", ncols=2, labelcolor=palette.ink)
    figure.supylabel("images", fontsize=9, color=palette.muted)
    panels[1].set_xlabel("margin")
    return figure


def landscape(view: RunView) -> Section | None:
    """The objective over s, p and c on the grid, one panel per c."""
    names = ["nuts_landscape", "nuts_landscape_usable", *(f"nuts_axis_{name}" for name in "spc")]
    if any(name not in view.arrays for name in names):
        return None
    worth, usable, *axes = (view.arrays[name] for name in names)
    kind = str(view.arrays["nuts_landscape_of"]) if "nuts_landscape_of" in view.arrays else "maps"
    prose = [f"{_objective(view)[0]} on the half of the fitting images that chooses, for {kind}: every scale "
             "s, power p and shift c of the grid, each at the threshold that keeps the target. A cross marks "
             "candidates that were rejected. The search goes on between the points of the grid, beyond its edges, and "
             "to other kinds of maps."]
    if float(worth.max()) - float(worth.min()) < 1e-6:
        prose.append("All of them do equally well here: a plateau.")
    if "nuts_chosen" in view.arrays:
        s, p, c, *_ = view.arrays["nuts_chosen"].tolist()
        prose.append(f"The search settled on s = {s:.3g}, p = {p:.3g}, c = {c:.3g}.")
    alt = "Heat maps of clean accuracy over scale and power, one for every shift"
    return Section("Landscape", prose, _kinds(view), [
        Picture("nuts-landscape", alt, lambda palette: draw_landscape(palette, worth, usable, axes,
                                                                             _objective(view)[2]))])


def _objective(view: RunView) -> tuple[str, str, str]:
    """What the search raised: in words, as the head of a column, and beside a scale."""
    if "nuts_objective" in view.arrays and str(view.arrays["nuts_objective"]) == "surrogate":
        words = "The share of the robust model's clean errors on which the accurate model may speak,"
        return words, "errors passed on", "errors passed on, %"
    return "Clean accuracy of the mixture", "clean", "answered rightly, %"


def _kinds(view: RunView) -> list[Table]:
    """The best of every kind of map; −inf where all candidates were rejected."""
    if "nuts_kinds" not in view.arrays:
        return []
    kinds, worth = (view.arrays[name].tolist() for name in ("nuts_kinds", "nuts_kinds_worth"))
    body = [[Cell(kind), Cell(numbers.percent(best) if np.isfinite(best) else "–")]
            for kind, best in zip(kinds, worth, strict=True)]
    return [Table("The best of every kind of map, on the half of the fitting images that chooses.",
                  ["maps", _objective(view)[1]], body, words=True)]


def draw_landscape(palette: Palette, worth: Array, usable: Array, axes: list[Array],
                   label: str = "answered rightly, %") -> Figure:
    """(C, P, S) shares as panels of p over s."""
    from matplotlib.figure import Figure

    scales, powers, shifts = axes
    figure = Figure(figsize=(style.WIDTH, 0.6 + 1.35 * -(-len(shifts) // 4)))
    grid = figure.subplots(-(-len(shifts) // 4), min(4, len(shifts)), sharex=True, sharey=True, squeeze=False)
    high = 100 * float(worth.max())
    low = min(100 * float(worth.min()), high - 1)  # a plateau is drawn as one
    for place, panel in enumerate(grid.flat):
        if place >= len(shifts):
            panel.set_axis_off()
            continue
        shown = panel.imshow(100 * worth[place], origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high)
        across, up = np.nonzero(~usable[place].T)
        panel.scatter(across, up, marker="x", s=8, linewidths=0.7, color=palette.paper)
        panel.set_title(f"c = {shifts[place]:.2f}", color=palette.muted, fontsize=8)
        panel.grid(visible=False)
        _ticks(panel, scales, powers)
    figure.colorbar(shown, ax=grid, label=label, fraction=0.04)
    figure.supxlabel("s", fontsize=9, color=palette.muted)
    figure.supylabel("p", fontsize=9, color=palette.muted)
    return figure


def _ticks(axes: Axes, scales: Array, powers: Array) -> None:
    ends = [0, len(scales) - 1]
    axes.set_xticks(ends, [f"{scales[i]:.2g}" for i in ends])
    axes.set_yticks(ends, [f"{powers[i]:.2g}" for i in ends])


def trade_off(view: RunView) -> Section | None:
    """Clean accuracy against what is kept under attack, of MixedNUTS and of plain mixing."""
    found = {name: view.arrays[f"nuts_curve_{key}"] for name, key in (("fitted map", "nuts"), ("plain mixing", "plain"))
             if f"nuts_curve_{key}" in view.arrays}
    if "fitted map" not in found:
        return None
    prose = ["Every point is a mixture that may lose so much and no more: clean accuracy, and the share of images that "
             "keep the right answer whatever the accurate model says, at the attacked points of the half of the "
             "fitting images that did not choose the maps. Up and to the right is better; both curves begin at the "
             "robust model and end where losing more gains nothing."]
    body = [[Cell(name), Cell(numbers.percent(clean)), Cell(numbers.percent(kept))]
            for name, curve in found.items() for clean, kept in curve.tolist()]
    table = Table("The same numbers as a table.", ["mixture", "clean", "kept under attack"], body, folded=True)
    alt = "Accuracy kept under attack against clean accuracy, for " + " and ".join(found)
    return Section("Trade-off against plain mixing", prose, [table],
                   [Picture("nuts-trade-off", alt, lambda palette: draw_trade_off(palette, found))])


def _worthwhile(curve: Array) -> Array:
    """The points of a curve that are more accurate than all that keep more."""
    best = np.maximum.accumulate(np.concatenate([[-np.inf], curve[:-1, 0]]))
    chosen: Array = curve[curve[:, 0] > best]
    return chosen


def draw_trade_off(palette: Palette, found: dict[str, Array]) -> Figure:
    """The fitted map in the mixture's colour, plain mixing dashed and grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.2))
    axes = figure.subplots()
    looks = {"fitted map": ("-", palette.mixed), "plain mixing": ("--", palette.muted)}
    for name, curve in ((name, _worthwhile(curve)) for name, curve in found.items()):
        line, colour = looks[name]
        axes.plot(100 * curve[:, 0], 100 * curve[:, 1], line, marker="o", color=colour, label=name)
    axes.set(xlabel="clean images answered rightly, %", ylabel="kept under attack, %")
    axes.legend(loc="lower left", labelcolor=palette.ink)
    return figure


def cost(view: RunView) -> Section | None:
    """Parameters and operations per prediction."""
    rows = view.summary.get("cost")
    if not rows:
        return None
    body = [[Cell(row["model"], model=row["model"] if row["model"] in style.MODELS else ""),
             *(Cell(_million(row.get(key))) for key in ("parameters", "flops"))] for row in rows]
    prose = ["Operations are those of convolutions and matrix products for one image; a multiplication with its "
             "addition counts as two."]
    if any("flops" not in row or "parameters" not in row for row in rows):
        prose.append("What a model computes outside of torch is not seen: a dash.")
    gated = next((row for row in rows if "asked" in row), None)
    if gated is not None:
        prose.append(f"Gated prediction runs the robust side first and the accurate side only where it can still "
                     f"change the answer: on {numbers.percent(gated['asked'])} of the clean images here. The answers "
                     f"are the same.")
    return Section("Cost of a prediction", prose, [Table("", ["model", "parameters", "operations"], body)])


def _million(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.2f} M"
