"""A fitted mixture: its guarantee, trade-off, margins, search landscape, and the cost of a
prediction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN
from equipoise.core.arrays import Array, FitArrays
from equipoise.core.rows import CALIBRATION, AttackRow
from equipoise.reporting.charts import (
    WIDTH,
    Chart,
    Histogram,
    Line,
    Palette,
    Panel,
    Picture,
    ReferenceLine,
)
from equipoise.reporting.section import SAME_NUMBERS, Cell, RunView, Section, Table, model_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_PER_ROW = 4


def fitted(run: RunView) -> Section | None:
    """What the fit guarantees, and why candidates were rejected."""
    fit, gate = run.summary.fit, run.summary.gate
    promise = fit.promise if fit is not None else gate.promise if gate is not None else None
    if promise is None:
        return None
    literal = fit is not None and fit.rule == "paper"  # a mixture also where it does not help
    prose, tables = [f"The mixture {promise}."], []
    if fit is not None and literal:
        prose.append(
            f"It is {fit.method}, Algorithm 1 as published, without the corrections of the other rules; the "
            "notes say where they would have mattered. On the images that it was fitted on, which is "
            f"optimistic, it classifies {format.percent(fit.clean)} of the clean images correctly, the robust "
            f"model {format.percent(fit.robust_clean)}."
        )
        if fit.objective is not None:
            again = (
                ""
                if fit.recomputed_objective is None
                else (
                    f", and {format.percent(fit.recomputed_objective)} if the mapped model is attacked again"
                )
            )
            prose.append(
                "The objective, the share of the robust model's clean errors that it still decides, is "
                f"{format.percent(fit.objective)}{again}; lower is better."
            )
    elif fit is not None and not fit.helped:
        prose = [f"{promise[:1].upper()}{promise[1:]}."]
    elif fit is not None:
        prose.append(
            "On the calibration half of the fitting images, the mixture classifies "
            f"{format.percent(fit.clean)} of the clean images correctly, the robust model "
            f"{format.percent(fit.robust_clean)}. Fitting images are never used for evaluation."
        )
    if fit is not None and fit.promised is not None:
        confidence = fit.promised.confidence
        prose.append(
            "In expectation means on average over fits: single fits exceed the target in about a third of the "
            "cases."
            if confidence is None
            else f"Of all fits, at most {100 * (1 - confidence):.3g} % exceed the target."
        )
    if fit is not None and fit.rejected:
        body = [[Cell(reason), Cell(str(count))] for reason, count in fit.rejected.items()]
        tables.append(Table("Rejected candidates.", ["reason", "candidates"], body, collapsed=True))
    if fit is not None and fit.notes:
        body = [[Cell(note)] for note in fit.notes]
        tables.append(
            Table("Notes of the search.", ["note"], body, is_text=True, collapsed=not literal)
        )
    title = "Fitted mixture" if fit is None or not fit.method else f"Fitted mixture: {fit.method}"
    return Section(title, prose, tables, leads=run.summary.command == "fit")


def promise(run: RunView) -> Section | None:
    """Whether the promises of fitted mixtures were kept on the images of an evaluation."""
    if not run.summary.promises:
        return None
    prose = [
        f"{'The mixture' if item.model == 'mixed' else run.name(item.model)}: {item.explanation}."
        for item in run.summary.promises
    ]
    prose.append(
        "The loss is the worst-case accuracy of the robust model minus that of the mixture, on the same "
        "images and under the attacks of this run."
    )
    body = [
        [
            Cell(run.name(item.model)),
            Cell(str(item.promised), item.promised.kind),
            Cell(format.number(100 * item.value, 1), format.interval(item.low, item.high)),
            Cell(str(item.n)),
            Cell("kept" if item.kept else "exceeded"),
        ]
        for item in run.summary.promises
    ]
    return Section(
        "Promise of the fit",
        prose,
        [
            Table(
                "Promised and measured loss of attacked accuracy in percent, with 95 % intervals (paired, Bonett-Price).",
                ["mixture", "loses at most", "measured", "n", "promise"],
                body,
                is_text=True,
            )
        ],
    )


def map_margins(run: RunView) -> Section | None:
    """Histograms of the robust model's margins before and after the logit map."""
    arrays, fit = FitArrays.load(run.folder), run.summary.fit
    alone = (
        fit is not None and not fit.helped and fit.method
    )  # older folders have no method, and keep the section
    if arrays is None or (
        alone
        and np.array_equal(arrays.clean_before, arrays.clean_after)
        and np.array_equal(arrays.attacked_before, arrays.attacked_after)
    ):
        return None  # no fit, or the robust model alone, which has no map
    literal = run.summary.fit is not None and run.summary.fit.rule == "paper"
    # The only candidate of a landscape is a reused map, which was selected elsewhere.
    selected = (
        ""
        if arrays.landscape.size == 1
        else f", {'all' if literal else 'half'} of which selected the map"
    )
    before, after = _groups(arrays, after=False), _groups(arrays, after=True)
    prose = [
        f"After the logit map, the accurate model decides where the margin of the robust model is at most "
        f"{arrays.q:.3g} (dotted line). The map separates images that are classified correctly under attack from "
        "clean images that are misclassified.",
        f"The margin is the largest probability of the robust model minus the second largest, on all n = "
        f"{len(arrays.clean_before)} fitting images{selected}. Attacked images are those where "
        "an attack made the margin of the true class smallest.",
    ]
    body = [
        [Cell(name), Cell(_median(before[name])), Cell(_median(after[name]))] for name in before
    ]
    bins = np.linspace(0, 1, 41).tolist()
    histograms = [
        [
            Histogram(
                values=values.tolist(),
                bins=bins,
                label=name,
                filled=name.startswith("clean"),
                color="robust" if name.endswith(" correct") else "wrong",
            )
            for name, values in groups.items()
        ]
        for groups in (before, after)
    ]
    alt = "Histograms of the robust model's margins before and after the map, correct and wrong, clean and attacked"
    chart = Chart(
        "map-margins",
        alt,
        [
            Panel(histograms[0], title="before the map"),
            Panel([*histograms[1], ReferenceLine(x=arrays.q)], title="after the map"),
        ],
        x_label="margin",
        y_label="images",
        height=3.6,
    )
    return Section(
        "Margins before and after the logit map",
        prose,
        [Table("Median margins.", ["images", "before the map", "after the map"], body)],
        [chart],
    )


def _groups(arrays: FitArrays, *, after: bool) -> dict[str, Array]:
    clean = arrays.clean_after if after else arrays.clean_before
    attacked = arrays.attacked_after if after else arrays.attacked_before
    return {
        "clean, correct": clean[arrays.clean_correct],
        "clean, wrong": clean[~arrays.clean_correct],
        "attacked, correct": attacked[arrays.attacked_correct],
        "attacked, wrong": attacked[~arrays.attacked_correct],
    }


def _median(values: Array) -> str:
    return f"{np.median(values):.3f}" if len(values) else "–"


def landscape(run: RunView) -> Section | None:
    """Score of every candidate of the grid over s, p and c, one panel per c; nothing of a reused
    map."""
    if (arrays := FitArrays.load(run.folder)) is None or arrays.landscape.size == 1:
        return None
    score, head = "Clean accuracy of the mixture", "clean accuracy"
    if arrays.objective != "mixture":
        score = "Share of the robust model's clean errors on which the accurate model decides"
        score += ", of those that it corrects" if arrays.objective == "conditional" else ""
        head = "errors passed on"
    literal = run.summary.fit is not None and run.summary.fit.rule == "paper"
    images = "all fitting images" if literal else "the search half of the fitting images"
    prose = [
        f"{score}, for {arrays.landscape_family}, at every scale s, power p and shift c of the grid. It is "
        f"measured on {images}, each candidate at the threshold that meets the target."
    ]
    prose.append(
        "No candidate is rejected, and the search ends with the grid."
        if literal
        else "Crosses mark rejected candidates, a ring the best of the others. The search continues between the "
        "grid points, beyond the grid and with other families of maps."
    )
    if float(arrays.landscape.max()) - float(arrays.landscape.min()) < 1e-6:
        prose.append("All candidates of the grid have the same score.")
    if arrays.selected is not None:
        s, p, c, *_ = arrays.selected.tolist()
        prose.append(f"Selected: s = {s:.3g}, p = {p:.3g}, c = {c:.3g}.")
    shown = []
    if arrays.family_scores is not None:
        body = [
            [Cell(family), Cell(format.percent(best) if np.isfinite(best) else "–")]
            for family, best in zip(arrays.families, arrays.family_scores.tolist(), strict=True)
        ]
        shown.append(
            Table(
                "Best candidate of every family of maps, on the search half of the fitting images.",
                ["family", head],
                body,
                is_text=True,
            )
        )
    alt = f"Heat maps of {head} over scale and power, one for every shift"
    return Section(
        "Search landscape",
        prose,
        shown,
        [Picture("landscape", alt, lambda palette: draw_landscape(palette, arrays, f"{head}, %"))],
    )


def draw_landscape(palette: Palette, arrays: FitArrays, label: str) -> Figure:
    """Heat maps of p over s, one panel per c."""
    from matplotlib.figure import Figure

    scores, shifts = 100 * arrays.landscape, arrays.axis_c
    rows = -(-len(shifts) // PANELS_PER_ROW)
    figure = Figure(figsize=(WIDTH, 0.6 + 1.35 * rows))
    grid = figure.subplots(
        rows, min(PANELS_PER_ROW, len(shifts)), sharex=True, sharey=True, squeeze=False
    )
    high = float(scores.max())
    low = min(float(scores.min()), high - 1)  # equal scores get one colour
    usable_high = float(scores[arrays.usable].max()) if arrays.usable.any() else math.inf
    for axes in grid.flat[len(shifts) :]:
        axes.set_axis_off()
    for axes, shift, score, usable in zip(grid.flat, shifts, scores, arrays.usable, strict=False):
        image = axes.imshow(
            score, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high
        )
        axes.scatter(
            *np.nonzero(~usable.T), marker="x", s=8, linewidths=0.7, color=palette["paper"]
        )
        axes.set_title(f"c = {format.number(shift, 2)}", color=palette["muted"], fontsize=8)
        axes.grid(visible=False)
        for values, set_ticks in (
            (arrays.axis_s, axes.set_xticks),
            (arrays.axis_p, axes.set_yticks),
        ):
            at = sorted({0, len(values) // 2, len(values) - 1})
            set_ticks(at, [f"{values[k]:.2g}" for k in at])
        best = np.argwhere(usable & (score == usable_high))
        axes.scatter(
            best[:, 1], best[:, 0], marker="o", s=26, facecolors="none", edgecolors=palette["wrong"]
        )
    figure.colorbar(
        image, ax=grid, label=label, fraction=0.04, format="%.4g", ticks=np.linspace(low, high, 5)
    )
    figure.supxlabel("scale s, logarithmic", fontsize=9, color=palette["muted"])
    figure.supylabel("power p", fontsize=9, color=palette["muted"])
    return figure


def trade_off(run: RunView) -> Section | None:
    """Clean accuracy against attacked accuracy of fitted maps and of plain mixing."""
    arrays = FitArrays.load(run.folder)
    if arrays is None or arrays.map_curve is None:
        return None
    fit = run.summary.fit
    method = fit.method if fit is not None and fit.helped and fit.method else "fitted map"
    curves = {method: arrays.map_curve}
    if arrays.plain_curve is not None:
        curves["plain mixing"] = arrays.plain_curve
    prose = [
        "Further up and to the right is better. Each point is a mixture that may lose a given number of points "
        "of the robust model's attacked accuracy. Both curves start at the robust model and end where a larger "
        "loss gains nothing.",
        "An attacked image counts only if it is classified correctly for every possible output of the accurate "
        "model. All numbers are from the half of the fitting images that did not select the maps. The same images "
        "set the thresholds, so attacked accuracies are what each target allows, not measurements: evaluate a "
        "mixture on other images.",
    ]
    n = sum(
        isinstance(row, AttackRow)
        and (row.model, row.attack, row.half) == ("robust", CLEAN, CALIBRATION)
        for row in run.rows
    )
    prose.append(
        "Numbers at points are the points of attacked accuracy that they lose."
        + (f" Bars are exact 95 % intervals over n = {n} images." if n else "")
    )
    body = [
        [
            Cell(name),
            Cell(_lost(curve, attacked)),
            Cell(format.percent(clean), _bounds(clean, n)),
            Cell(format.percent(attacked), _bounds(attacked, n)),
        ]
        for name, curve in curves.items()
        for clean, attacked in curve.tolist()
    ]
    table = Table(
        f"{SAME_NUMBERS}.", ["mixture", "points lost", "clean", "attacked"], body, collapsed=True
    )
    lines = [
        _trade_off_line(name, curve, color, linestyle, n)
        for (name, curve), color, linestyle in zip(
            curves.items(), ("mixed", "muted"), ("-", "--"), strict=False
        )
    ]
    accurate = run.find("accurate", CLEAN)
    reference = (
        []
        if accurate is None
        else [ReferenceLine(x=100 * accurate.value, text="accurate model, clean")]
    )
    chart = Chart(
        "fit-trade-off",
        "Attacked accuracy against clean accuracy, for " + " and ".join(curves),
        [Panel([*lines, *reference])],
        x_label="clean accuracy, %",
        y_label="attacked accuracy, %",
        height=3.6,
    )
    return Section("Trade-off compared with plain mixing", prose, [table], [chart])


def _trade_off_line(name: str, curve: Array, color: str, linestyle: str, n: int) -> Line:
    points = gains(curve)
    clean, attacked = (
        [stats.of_share(share, n) for share in shares] if n else [] for shares in points.T.tolist()
    )
    texts = (
        [_lost(curve, attacked) for attacked in points[:, 1].tolist()] if color == "mixed" else []
    )
    return Line(
        x=(100 * points[:, 0]).tolist(),
        y=(100 * points[:, 1]).tolist(),
        color=color,
        label=name,
        linestyle=linestyle,
        low=[100 * share.low for share in attacked],
        bars=True,
        texts=texts,
        high=[100 * share.high for share in attacked],
        x_low=[100 * share.low for share in clean],
        x_high=[100 * share.high for share in clean],
    )


def _lost(curve: Array, attacked: float) -> str:
    """Points of attacked accuracy that a mixture loses against the robust model, where the curve
    starts."""
    return format.number(100 * (float(curve[0, 1]) - attacked), 1)


def _bounds(share: float, n: int) -> str:
    return format.bounds(stats.of_share(share, n)) if n else ""


def gains(curve: Array) -> Array:
    """The points of a curve that are more accurate than all points before them."""
    best = np.maximum.accumulate(np.concatenate([[-np.inf], curve[:-1, 0]]))
    points: Array = curve[curve[:, 0] > best]
    return points


def cost(run: RunView) -> Section | None:
    """Parameters and operations per prediction."""
    costs = run.summary.costs
    if not costs:
        return None
    body = [
        [
            model_cell(run.name(cost.model)),
            Cell(_millions(cost.parameters)),
            Cell(_millions(cost.flops)),
        ]
        for cost in costs
    ]
    prose = [
        "Operations are those of convolutions and matrix products for one image; a multiplication with its "
        "addition counts as two."
    ]
    if any(cost.flops is None or cost.parameters is None for cost in costs):
        prose.append("A dash marks models that compute outside of torch, whose cost is unknown.")
    share = next((cost.accurate_share for cost in costs if cost.accurate_share is not None), None)
    if share is not None:
        prose.append(
            "Gated prediction runs the robust model first, and the accurate model only where it can still "
            f"change the prediction: for {format.percent(share)} of the clean images. The predictions are the "
            "same."
        )
    passes = next((cost.robust_passes for cost in costs if cost.robust_passes is not None), None)
    if passes is not None:
        attacked = None if run.summary.fit is None else run.summary.fit.attacked_passes
        more = (
            ""
            if attacked is None
            else (
                f", and {attacked:.2f} per attacked one at the most expensive point that "
                "the fit found"
            )
        )
        prose.append(f"It runs {passes:.2f} views of the robust model per clean image{more}.")
    return Section(
        "Cost of a prediction", prose, [Table("", ["model", "parameters", "operations"], body)]
    )


def _millions(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.2f} M"
