"""A fitted mixture: its promise, its frontier, margins before and after the map, and the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import Array, FitArrays, FrontierArrays
from equipoise.core.rows import CALIBRATION, AttackRow
from equipoise.reporting import charts
from equipoise.reporting.run_view import MIXED, RunView
from equipoise.reporting.section import (
    Cell,
    Figure,
    Records,
    Section,
    Table,
    metric_name,
    result_cell,
)

ALPHA = "alpha: weight of the robust model"
GROUPS = ("attacked, correct", "attacked, wrong", "clean, correct", "clean, wrong")


def fitted(run: RunView) -> Section | None:
    """What the fit promises, on which images it was measured, and what was rejected."""
    fit = run.summary.fit
    promises = _promise_table(run)
    if fit is None:
        return Section("Promise", tables=promises) if promises else None
    text = [
        f"The mixture {fit.promise}."
        if fit.helped
        else f"{fit.promise[:1].upper()}{fit.promise[1:]}."
    ]
    if fit.helped or fit.rule == "paper":
        images = "all" if fit.rule == "paper" else "the calibration half"
        text.append(
            f"On {images} of the fitting images the mixture classifies {format.percent(fit.clean)} of the clean "
            f"images correctly, the robust model {format.percent(fit.robust_clean)}."
        )
    if fit.objective is not None:
        again = ""
        if fit.recomputed_objective is not None:
            again = f", and {format.percent(fit.recomputed_objective)} if the mapped model is attacked again"
        text.append(
            "The objective, the share of the robust model's clean errors that it still decides, is "
            f"{format.percent(fit.objective)}{again}; lower is better."
        )
    if fit.promised is not None:
        confidence = fit.promised.confidence
        meaning = "On average over fits: about a third of single fits exceed the target."
        if confidence is not None:
            meaning = f"At most {100 * (1 - confidence):.3g} % of all fits exceed the target."
        text.append(meaning)
    tables = promises
    if fit.rejected:
        rows = [[Cell(reason), Cell(str(count))] for reason, count in fit.rejected.items()]
        tables.append(Table("Rejected candidates.", ["reason", "candidates"], rows, collapsed=True))
    if fit.notes:
        notes = [[Cell(note)] for note in fit.notes]
        tables.append(Table("Notes of the search.", ["note"], notes, is_text=True, collapsed=True))
    return Section("Fit", text, tables=tables)


def _promise_table(run: RunView) -> list[Table]:
    rows = []
    for item in run.summary.promises:
        lost = Cell(format.number(100 * item.value, 1), format.interval(item.low, item.high))
        kept = Cell(
            "kept" if item.kept else "exceeded", "" if item.is_clear else "the interval includes it"
        )
        promised = Cell(str(item.promised), item.promised.kind)
        rows.append([Cell(run.name(item.model)), promised, lost, Cell(str(item.n)), kept])
    if not rows:
        return []
    caption = "Promised and measured loss of robust accuracy in %, with 95 % intervals (paired, Bonett-Price)."
    head = ["mixture", "loses at most", "lost", "n", "promise"]
    return [Table(caption, head, rows)]


def frontier(run: RunView) -> Section | None:
    """Which other mixtures of the same models there are, and what each gains and costs."""
    measured, fitting = _measured_frontier(run), _fitting_frontier(run)
    if measured is None and fitting is None:
        return None
    text, figures = [], []
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
    return Section("Frontier", text, figures)


def _measured_frontier(run: RunView) -> Figure | None:
    arrays = FrontierArrays.load(run.folder)
    if arrays is None:
        return None
    labels = {}
    for row in run.rows:
        if isinstance(row, AttackRow):
            labels[row.index] = row.label
    known = [position for position, index in enumerate(arrays.index.tolist()) if index in labels]
    if not known:
        return None
    label = np.array([labels[index] for index in arrays.index[known].tolist()])
    records: Records = []
    for at in np.argsort(-arrays.alpha, kind="stable").tolist():
        clean = _share(arrays.predicted[at, known] == label)
        robust = _share(arrays.standing[at, known])
        decided = float(arrays.by_accurate[at, known].mean())
        alpha, lost = float(arrays.alpha[at]), float(arrays.lost[at])
        target = "" if math.isnan(lost) else f", may lose {format.number(100 * lost, 2)} points"
        record = {
            "model": "mixture",
            "step": len(records) + 1,
            "alpha": alpha,
            "accurate_share": round(decided, 4),
        }
        record["label"] = (
            f"alpha {alpha:.3g}{target}: {format.percent(clean.value)} / {format.percent(robust.value)}"
        )
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


def fitted_curves(run: RunView) -> dict[str, Array]:
    """(T, 2) clean and robust accuracy of mixtures that may lose more and more, on fitting images."""
    arrays = FitArrays.load(run.folder)
    if arrays is None or arrays.map_curve is None:
        return {}
    fit = run.summary.fit
    method = fit.method if fit is not None and fit.helped and fit.method else "fitted map"
    curves = {method: gains(arrays.map_curve)}
    if arrays.plain_curve is not None:
        curves["plain mixing"] = gains(arrays.plain_curve)
    return curves


def _fitting_frontier(run: RunView) -> Figure | None:
    curves = fitted_curves(run)
    if not curves:
        return None
    n = 0
    for row in run.rows:
        if isinstance(row, AttackRow) and row.half == CALIBRATION:
            n += (row.model, row.attack) == ("robust", CLEAN)
    records: Records = []
    for name, points in curves.items():
        for step, (clean, robust) in enumerate(points.tolist()):
            lost = format.number(100 * (float(points[0, 1]) - robust), 1)
            record = {"model": name, "step": step, "label": f"loses {lost} points"}
            if n:
                record |= charts.fields(stats.of_share(clean, n), "clean")
                record |= charts.fields(stats.of_share(robust, n), "robust")
            else:
                record |= {"clean": round(clean, 5), "robust": round(robust, 5)}
            records.append(record)
    return charts.trade_off(
        "fit-trade-off",
        f"Fitted mixtures and plain mixing, on fitting images{', with 95 % intervals' if n else ''}",
        records,
        dict(zip(curves, ("mixed", "muted"), strict=False)),
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
    unchanged = unchanged and np.array_equal(arrays.attacked_before, arrays.attacked_after)
    if fit is not None and not fit.helped and unchanged:
        return None  # the robust model alone, which has no map
    figures = [
        _margin_figure("map-margins", "Margins of the robust model with the map", after, arrays.q)
    ]
    if not unchanged:
        title = "Margins of the robust model without a map"
        figures.insert(0, _margin_figure("margins-before", title, before, None))
    rows = []
    for name in GROUPS:
        rows.append([Cell(name), Cell(_median(before[name])), Cell(_median(after[name]))])
    text = (
        f"The accurate model decides where the margin is at most {arrays.q:.3g} (dashed). Images that are correct "
        "under attack must lie right of it; clean images that are wrong should lie left of it. The margin is the "
        f"largest probability minus the second largest, on all n = {len(arrays.clean_before)} fitting images."
    )
    table = Table(
        "Median margins.", ["images", "without the map", "with the map"], rows, collapsed=True
    )
    return Section("Margins of the fit", [text], figures, [table])


def _groups(clean: Array, attacked: Array, arrays: FitArrays) -> dict[str, Array]:
    right, robust = arrays.clean_correct.astype(bool), arrays.attacked_correct.astype(bool)
    parts = (attacked[robust], attacked[~robust], clean[right], clean[~right])
    return dict(zip(GROUPS, parts, strict=True))


def _margin_figure(name: str, title: str, groups: dict[str, Array], rule: float | None) -> Figure:
    records: Records = []
    for group, values in groups.items():
        if len(values):
            records += charts.cumulative(group, values.tolist())
    return charts.curves(
        name,
        f"{title}: images at or below each",
        records,
        dict(zip(GROUPS, ("robust", "wrong", "accurate", "other-4"), strict=True)),
        x="margin: largest minus second probability",
        y="images at or below",
        x_range=(0, 1),
        steps=True,
        rule=rule,
    )


def _median(values: Array) -> str:
    return f"{np.median(values):.3f}" if len(values) else "–"


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
    text = [
        f"Candidates are {arrays.landscape_family}, each at the threshold that meets the target."
    ]
    if arrays.selected is not None and len(arrays.selected) >= 3:
        s, p, c = arrays.selected.tolist()[:3]
        text.append(f"Selected: s = {s:.3g}, p = {p:.3g}, c = {c:.3g}.")
    return Section("Search", text, [figure])


def _written(axis: Array) -> list[str]:
    return list(dict.fromkeys(f"{value:.3g}" for value in axis.tolist()))


def alphas(run: RunView) -> Section | None:
    """Accuracy of the mixture at every alpha of the run, or of that in `sweep/`."""
    sweep = run if run.alphas(MIXED, CLEAN) else run.subrun("sweep")
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
