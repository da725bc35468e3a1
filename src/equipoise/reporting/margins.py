"""Signed margins: how far the right answer is ahead, clean and attacked."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from equipoise.reporting import style
from equipoise.reporting.section import Picture, Section
from equipoise.reporting.style import MODELS, Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Margins = dict[str, dict[str, list[float]]]  # model → "clean" or "attacked" → margins in image order
BINS = 40


def margins(view: RunView) -> Section | None:
    """A histogram per model, clean against the worst case over the attacks."""
    found = collect(view)
    if not found:
        return None
    counts = sorted({len(own["clean"]) for own in found.values()})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    prose = [f"The margin of an image is the score of its true class minus the best other one, as the run wrote it "
             f"down: above zero the answer is right. Filled: clean images. Outlined: the same n = {n} images at their "
             f"smallest margin, clean or under any attack. Bars count single images, so they carry no interval."]
    alt = "Histograms of signed margins, clean and attacked, for " + ", ".join(found)
    return Section("Margins", prose, pictures=[Picture("margins", alt, lambda palette: draw(palette, found))])


def collect(view: RunView) -> Margins:
    """Margins of the images that a model has met clean and under each of its attacks."""
    seen: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in view.rows:
        if "margin" in row and row.get("alpha") is None:
            seen[row["model"]][row["attack"]][row["index"]] = row["margin"]
    found: Margins = {}
    for model in [*(m for m in MODELS if m in seen), *(m for m in seen if m not in MODELS)]:
        clean = seen[model].pop("clean", {})
        attacks = list(seen[model].values())
        common = sorted(set(clean).intersection(*attacks)) if attacks else []
        if common:
            found[model] = {"clean": [clean[i] for i in common],
                            "attacked": [min(attack[i] for attack in [clean, *attacks]) for i in common]}
    return found


def draw(palette: Palette, found: Margins) -> Figure:
    """One panel per model on a common axis."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(style.WIDTH, 0.5 + 1.25 * len(found)))
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    widest = max(1.0, *(abs(m) for own in found.values() for kind in own.values() for m in kind))
    bins = np.linspace(-widest, widest, BINS + 1)
    for axes, (model, colour) in zip(panels, palette.of(found).items(), strict=True):
        axes.hist(found[model]["clean"], bins=bins, color=colour, alpha=0.3)
        axes.hist(found[model]["attacked"], bins=bins, histtype="step", color=colour, linewidth=1.4)
        axes.axvline(0, color=palette.muted, linewidth=0.8)
        axes.set_title(model, loc="left", color=colour)
        axes.locator_params(axis="y", nbins=3, integer=True)
    # One key for all panels, in no model's colour.
    key = [Patch(facecolor=palette.muted, alpha=0.4, label="clean"),
           Patch(facecolor="none", edgecolor=palette.muted, linewidth=1.4, label="attacked")]
    figure.legend(handles=key, loc="outside upper right", ncols=2, labelcolor=palette.ink)
    figure.supylabel("images", fontsize=9, color=palette.muted)
    panels[-1].set_xlabel("signed margin")
    return figure
