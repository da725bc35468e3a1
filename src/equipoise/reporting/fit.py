"""A fitted mixture: its promise, its frontier, margins before and after the map, and the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import Array, FitArrays, FrontierArrays
from equipoise.core.format import percent
from equipoise.core.rows import AttackRow
from equipoise.reporting import charts
from equipoise.reporting.run_view import MIXED, RunView
from equipoise.reporting.section import (
    Cell,
    Figure,
    Records,
    Section,
    Table,
    cells,
    metric_name,
    result_cell,
)

ALPHA = "alpha: weight of the robust model"


def fitted(run: RunView) -> Section | None:
    """What the fit promises, on which images it was measured, and what was rejected."""
    fit, text, tables = run.summary.fit, [], _promise_table(run)
    if fit is None and not tables:
        return None
    if fit is None:
        return Section("Promise", tables=tables)
    text.append(run.promise)
    if fit.helped or fit.rule == "paper":
        images = "all" if fit.rule == "paper" else "the calibration half"
        text.append(
            f"On {images} of the fitting images the mixture classifies {percent(fit.clean)} of the clean "
            f"images correctly, the robust model {percent(fit.robust_clean)}."
        )
    if fit.objective is not None:
        text.append(
            "The objective is the share of the robust model's clean errors that it still decides, lower is better: "
            f"{percent(fit.objective)}."
        )
    if fit.recomputed_objective is not None:
        text.append(
            f"It is {percent(fit.recomputed_objective)} if the mapped model is attacked again."
        )
    if fit.promised is not None and fit.promised.confidence is None:
        text.append("On average over fits: about a third of single fits exceed the target.")
    elif fit.promised is not None and fit.promised.confidence is not None:
        text.append(
            f"At most {100 * (1 - fit.promised.confidence):.3g} % of all fits exceed the target."
        )
    notes = [cells(note) for note in fit.notes]
    for reason, count in fit.rejected.items():
        notes.append(cells(f"{reason}: {count} candidates rejected"))
    if notes:
        tables.append(Table("Notes of the fit.", ["note"], notes, is_text=True, collapsed=True))
    return Section("Fit", text, tables=tables)


def _promise_table(run: RunView) -> list[Table]:
    rows = []
    for item in run.summary.promises:
        lost = Cell(format.number(100 * item.value, 1), format.interval(item.low, item.high))
        clear = "" if item.is_clear else "the interval includes it"
        kept = Cell("kept" if item.kept else "exceeded", clear)
        promised = Cell(str(item.promised), item.promised.kind)
        rows.append(cells(run.name(item.model), promised, lost, str(item.n), kept))
    if not rows:
        return []
    caption = "Promised and measured loss of robust accuracy in %, with 95 % intervals (paired, Bonett-Price)."
    return [Table(caption, ["mixture", "loses at most", "lost", "n", "promise"], rows)]


def frontier(run: RunView) -> Section | None:
    """Which other mixtures of the same models there are, and what each gains and costs."""
    text, figures = [], []
    measured, fitting = _measured_frontier(run), _fitting_frontier(run)
    if measured is not None:
        text.append(
            "Move the slider along the mixtures that the same fit would have made for other targets, on the images "
            "of this run. Robust accuracy of a point is an estimate: images that are correct at every point that the "
            "attacks tried, whatever the accurate model says there."
        )
        figures.append(measured)
    if fitting is not None:
        text.append(
            "On the fitting images, which also set the thresholds, robust accuracies are what each target allows, "
            "not measurements."
        )
        figures.append(fitting)
    if not figures:
        return None
    return Section("Frontier", text, figures)


def _measured_frontier(run: RunView) -> Figure | None:
    arrays = FrontierArrays.load(run.folder)
    if arrays is None:
        return None
    labels = {row.index: row.label for row in run.rows if isinstance(row, AttackRow)}
    label = np.array([labels.get(index, -1) for index in arrays.index.tolist()])
    known = label >= 0
    if not known.any():
        return None
    records: Records = []
    for at in np.argsort(-arrays.alpha, kind="stable").tolist():
        clean = _share((arrays.predicted[at] == label)[known])
        robust = _share(arrays.standing[at, known])
        decided = float(arrays.by_accurate[at, known].mean())
        alpha, lost = float(arrays.alpha[at]), float(arrays.lost[at])
        target = "" if math.isnan(lost) else f", may lose {format.number(100 * lost, 2)} points"
        shares = f"{percent(clean.value)} / {percent(robust.value)}"
        record = {"model": "mixture", "step": len(records) + 1, "alpha": alpha}
        record |= {
            "accurate_share": round(decided, 4),
            "label": f"alpha {alpha:.3g}{target}: {shares}",
        }
        records.append(record | charts.fields(clean, "clean") | charts.fields(robust, "robust"))
    return charts.trade_off(
        "frontier",
        "Other mixtures of these models; the chosen one with 95 % intervals",
        records,
        {"mixture": "mixed"},
        y="robust accuracy (estimate)",
        joined=True,
        slider="Mixture, from robust to accurate",
    )


def _share(correct: Array) -> stats.Estimate:
    return stats.clopper_pearson(int(correct.sum()), len(correct))


def gains(curve: Array) -> Array:
    """The points of a curve that are more accurate than all points before them."""
    best = np.maximum.accumulate(np.concatenate([[-np.inf], curve[:-1, 0]]))
    points: Array = curve[curve[:, 0] > best]
    return points


def frontier_on_fitting_images(run: RunView) -> list[list[float]]:
    """Clean and robust accuracy of fitted mixtures that may lose more and more, on fitting images."""
    arrays = FitArrays.load(run.folder)
    if arrays is None or arrays.map_curve is None:
        return []
    curve: list[list[float]] = gains(arrays.map_curve).tolist()
    return curve


def _fitting_frontier(run: RunView) -> Figure | None:
    fitted_points, arrays = frontier_on_fitting_images(run), FitArrays.load(run.folder)
    if not fitted_points or arrays is None:
        return None
    curves = {"fitted": fitted_points}
    if arrays.plain_curve is not None:
        curves["plain mixing"] = gains(arrays.plain_curve).tolist()
    records: Records = []
    for name, points in curves.items():
        for step, (clean, robust) in enumerate(points):
            record = {
                "model": name,
                "step": step,
                "clean": round(clean, 5),
                "robust": round(robust, 5),
            }
            lost = format.number(100 * (points[0][1] - robust), 1)
            records.append({**record, "label": f"loses {lost} points"})
    return charts.trade_off(
        "fit-trade-off",
        "Fitted mixtures and plain mixing, on fitting images",
        records,
        {"fitted": "mixed", "plain mixing": "muted"},
        y="robust accuracy that the target allows",
        joined=True,
    )


def map_margins(run: RunView) -> Section | None:
    """Does the map separate images that must be kept from those that the accurate model may
    decide?"""
    arrays, fit = FitArrays.load(run.folder), run.summary.fit
    if arrays is None:
        return None
    before = _groups(arrays.clean_before, arrays.attacked_before, arrays)
    after = _groups(arrays.clean_after, arrays.attacked_after, arrays)
    unchanged = np.array_equal(arrays.clean_before, arrays.clean_after)
    unchanged &= np.array_equal(arrays.attacked_before, arrays.attacked_after)
    if fit is not None and not fit.helped and unchanged:
        return None  # the robust model alone, which has no map
    figures = []
    if not unchanged:
        figures.append(_margin_figure("margins-before", "without a map", before, None))
    figures.append(_margin_figure("map-margins", "with the map", after, arrays.q))
    text = (
        f"The accurate model decides where the margin is at most {arrays.q:.3g} (dashed). Images that are correct "
        "under attack must lie right of it; clean images that are wrong should lie left of it. The margin is the "
        f"largest probability minus the second largest, on all n = {len(arrays.clean_before)} fitting images."
    )
    return Section("Margins of the fit", [text], figures)


def _groups(clean: Array, attacked: Array, arrays: FitArrays) -> dict[str, Array]:
    right, robust = arrays.clean_correct.astype(bool), arrays.attacked_correct.astype(bool)
    return {
        "attacked, correct": attacked[robust],
        "attacked, wrong": attacked[~robust],
        "clean, correct": clean[right],
        "clean, wrong": clean[~right],
    }


def _margin_figure(name: str, when: str, groups: dict[str, Array], rule: float | None) -> Figure:
    records: Records = []
    for group, values in groups.items():
        records += charts.cumulative(group, values.tolist())
    return charts.curves(
        name,
        f"Images at or below each margin of the robust model {when}",
        records,
        dict(zip(groups, ("robust", "wrong", "accurate", "other-4"), strict=True)),
        x="margin: largest minus second probability",
        y="images at or below",
        x_range=(0, 1),
        steps=True,
        rule=rule,
    )


def landscape(run: RunView) -> Section | None:
    """The score of every candidate of the grid; nothing of a fit that searched no grid."""
    arrays = FitArrays.load(run.folder)
    if arrays is None or arrays.landscape.size == 1:
        return None
    records: Records = []
    for at, score in np.ndenumerate(arrays.landscape):
        shift, power, scale = arrays.axis_c[at[0]], arrays.axis_p[at[1]], arrays.axis_s[at[2]]
        record = {"choice": f"{shift:.3g}", "x": f"{scale:.3g}", "y": f"{power:.3g}"}
        if math.isfinite(score):
            usable = bool(arrays.usable[at])
            records.append({**record, "value": round(float(score), 4), "usable": usable})
    scores = {record["value"] for record in records}
    if len(scores) < 2:  # nothing to see
        return None
    score_name = "clean accuracy" if arrays.objective == "mixture" else "errors passed on"
    figure = charts.heat(
        "landscape",
        f"Score of every candidate of the search: {score_name}",
        records,
        x="scale s",
        y="power p",
        value=score_name,
        choice="Shift c:",
        columns=_written(arrays.axis_s),
        rows=_written(arrays.axis_p[::-1]),
    )
    text = f"Candidates are {arrays.landscape_family}, each at the threshold that meets the target."
    return Section("Search", [text], [figure])


def _written(axis: Array) -> list[str]:
    return list(dict.fromkeys(f"{value:.3g}" for value in axis.tolist()))


def alphas(run: RunView) -> Section | None:
    """Accuracy of the mixture at every alpha of the run, or of that in `sweep/`."""
    sweep: RunView | None = run
    if not run.alphas(MIXED, CLEAN):
        sweep = run.subrun("sweep")
    if sweep is None or not sweep.alphas(MIXED, CLEAN):
        return None
    metrics = [CLEAN, *sweep.attacks]
    if len(sweep.attacks) > 1:
        metrics.append(WORST)
    shown = [metric for metric in metrics if sweep.alphas(MIXED, metric)]
    records: Records = []
    rows: dict[float, list[Cell]] = {}
    for metric in shown:
        for result in sweep.alphas(MIXED, metric):
            alpha = result.alpha or 0.0
            record = {"model": metric_name(metric), "x": alpha, "n": result.n}
            records.append(record | charts.fields(result, "y"))
            rows.setdefault(alpha, [Cell(f"{alpha:g}")]).append(result_cell(result))
    figure = charts.curves(
        "alpha",
        "Accuracy of the mixture at each alpha, with 95 % intervals",
        records,
        _colours(shown),
        x=ALPHA,
        y="images classified correctly",
        dots=True,
    )
    text = ["At 0 the mixture is the accurate model, at 1 the robust one."]
    if sweep is not run:
        text.append(
            "This is plain mixing without the fitted map, on fitting images under a short attack."
        )
    table = Table(
        "The same numbers.",
        ["alpha", *map(metric_name, shown)],
        list(rows.values()),
        collapsed=True,
    )
    return Section("Accuracy against alpha", text, [figure], [table])


def _colours(metrics: Sequence[str]) -> dict[str, str]:
    """Colours of accuracies of one model: an attack on one of its bases has the colour of the
    base."""
    known = {CLEAN: "mixed", WORST: "ink", "std": "accurate", "rob": "robust"}
    colours = {}
    for number, metric in enumerate(metrics):
        colours[metric_name(metric)] = known.get(metric, f"other-{1 + number % 6}")
    return colours
