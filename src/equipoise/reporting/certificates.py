"""Certified accuracy against the radius, mixtures of equal clean accuracy, and estimated margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from equipoise.certification.mixture import THEOREM_NAMES, THEOREMS, upper_bounds
from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN
from equipoise.core.results import Result
from equipoise.core.rows import (
    CertificateRow,
    by_mixture,
    certificates,
)
from equipoise.reporting import charts
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import (
    Cell,
    Figure,
    Records,
    Section,
    Table,
    cells,
    metric_name,
    result_cell,
    result_table,
)

Radii = NDArray[np.float64]  # (N,) certified radius of every image, 0 if misclassified or abstained
ACR = "acr"
CERTIFIED_AT = "certified@"
RADIUS = "ℓ2 radius, in [0, 1] pixels"
CURVE = 81  # radii of a curve
MOST_SENTENCES = 3  # models in the verdict


def radius_of(metric: str) -> float:
    """The radius of "certified@0.25"."""
    return float(metric.partition("@")[2])


def radii_of(rows: Sequence[CertificateRow]) -> Radii:
    """The certified radius of every image."""
    return np.array([row.radius if row.correct else 0.0 for row in rows])


def certified_metrics(results: Sequence[Result]) -> list[str]:
    """The metrics of certified accuracy, in order of their radii."""
    found = {result.metric for result in results if result.metric.startswith(CERTIFIED_AT)}
    return sorted(found, key=radius_of)


def verdict(run: RunView) -> Section | None:
    """How many images are certified at which radius, under which noise."""
    models = by_mixture(run.rows)
    if not models:
        return None
    metrics = certified_metrics(run.summary.results)
    figures, text = [], []
    radii = {run.name(*mixture): radii_of(rows) for mixture, rows in models.items()}
    if run.setting("plan", "decide_radius") is None:  # else nothing is known about other radii
        figures.append(figure("certified", "Certified accuracy against radius", radii, run.colours))
    shares = []
    for (model, alpha), rows in list(models.items())[:MOST_SENTENCES]:
        result = run.find(model, _shown_radius(run, metrics), alpha)
        if result is not None:
            name = f"{run.name(model, alpha)} (σ = {rows[0].sigma:g})"
            shares.append(f"{name} for {format.percent(result.value)} of n = {result.n} images")
    if shares:
        radius = radius_of(_shown_radius(run, metrics))
        text.append(
            f"Predictions are correct and certified at ℓ2 radius {radius:g}: {'; '.join(shares)}."
        )
    definition = (
        "The prediction is the class that is most frequent under Gaussian noise of standard deviation σ. "
        "Certified at a radius: correct, and no perturbation of that Euclidean length can change it."
    )
    failure = run.setting("plan", "failure")
    if isinstance(failure, float):
        definition += f" Each certificate may be wrong with probability {failure:g}."
    columns = [metric for metric in (CLEAN, ACR, *metrics) if metric in run.metrics]
    caption = (
        "Smoothed predictions, with 95 % intervals; the average radius counts wrong images as 0."
    )
    table = result_table(run, caption, models, columns[:4])
    return Section("Verdict", [*text, definition], figures, [table])


def _shown_radius(run: RunView, metrics: Sequence[str]) -> str:
    """The smallest positive radius at which anything is certified."""
    for metric in metrics:
        for result in run.summary.results:
            if result.metric == metric and radius_of(metric) > 0 and result.value > 0:
                return metric
    return metrics[0] if metrics else ""


def figure(
    name: str,
    title: str,
    radii: Mapping[str, Radii],
    palette: charts.Palette,
    *,
    intervals: bool = True,
) -> Figure:
    """Certified accuracy of several models against the radius, with exact intervals."""
    longest = float(np.concatenate(list(radii.values())).max(initial=0.0))
    records: Records = []
    for model, own in radii.items():
        for at in np.linspace(0, max(1.05 * longest, 0.1), CURVE):
            reached = int((own >= max(at, 1e-12)).sum())
            values = charts.fields(stats.clopper_pearson(reached, len(own)), "y")
            if not intervals:
                values = {"y": values["y"]}
            records.append({"model": model, "x": round(float(at), 5), **values})
    if intervals:
        title += ", with 95 % intervals"
    return charts.curves(
        name, title, records, palette, x=RADIUS, y="certified accuracy", steps=True
    )


def certified(run: RunView) -> Section | None:
    """Every metric of the certificates, and attacks within the certified radii."""
    models = by_mixture(run.rows)
    if not models:
        return None
    text = []
    for result in run.summary.results:
        if result.allowed is not None:
            attack = result.metric.removeprefix("broken-")
            text.append(
                f"Cross-check: {attack} inside the certified radii of {run.name(result.model, result.alpha)} broke "
                f"{result.count} of {result.n} certificates; the failure probability allows {result.allowed}."
            )
    decided = run.setting("plan", "decide_radius")
    if decided is not None:
        text.append(
            f"Sampling stopped as soon as it was decided whether the radius reaches {decided}."
        )
    table = _metric_table(run, run.summary.results, "All metrics, with 95 % intervals.")
    return Section("Certificates", text, tables=[table])


def _metric_table(
    run: RunView, results: Sequence[Result], caption: str, *, collapsed: bool = False
) -> Table:
    """A row for each metric, a column for each model."""
    found: dict[str, dict[str, Result]] = {}
    names: dict[str, None] = {}
    for result in results:
        name = run.name(result.model, result.alpha)
        names[name] = None
        found.setdefault(metric_name(result.metric), {})[name] = result
    rows = []
    for metric, own in found.items():
        rows.append(cells(metric, *(result_cell(own.get(name)) for name in names)))
    return Table(caption, ["metric", *names], rows, collapsed=collapsed)


def theorem_radii(rows: Sequence[CertificateRow], alpha: float | None, theorem: str) -> Radii:
    """Radii of a mixture by one of the theorems, from the same lower bounds; 0 where the smoothed
    model is wrong."""
    lower = np.array([row.lower for row in rows])
    radii = THEOREMS[theorem](
        lower, rows[0].sigma, 1.0 if alpha is None else alpha, upper_bounds(rows)
    )
    correct = np.array([row.top == row.label for row in rows])
    return np.where(correct, radii, 0.0)


def theorems(run: RunView) -> Section | None:
    """Mixtures at several alphas by every theorem [Bai2024, Figure 3], from the same votes."""
    results = run.summary.theorems
    measured = {(item.model, item.alpha) for item in results}
    figures, tables = [], []
    for theorem, title in THEOREM_NAMES.items():
        radii = {}
        for mixture, rows in by_mixture(run.rows).items():
            if mixture in measured:
                radii[run.name(*mixture)] = theorem_radii(rows, mixture[1], theorem)
        if len(radii) < 2:
            return None
        figures.append(figure(f"certified-{theorem}", title, radii, run.colours, intervals=False))
        own = [item for item in results if item.theorem == theorem]
        caption = f"{title}, with 95 % intervals."
        tables.append(_metric_table(run, own, caption, collapsed=theorem != "ours"))
    text = (
        "All alphas and all theorems use the same confidence bounds, which hold together with the failure "
        "probability of one certificate. Our radius is never smaller than the others."
    )
    return Section("Mixtures by alpha and theorem", [text], figures, tables)


def equal_accuracy(run: RunView) -> Section | None:
    """Mixtures of one clean accuracy, alpha and sigma varied together [Bai2024, Figures 6, 7]."""
    selected = run.summary.selected_alphas
    if not selected:
        return None
    text = [
        "More noise certifies larger radii but lowers clean accuracy; a smaller alpha compensates. Each smoothed "
        "model is mixed with the same accurate model, at the largest alpha with which the mixture is estimated to "
        f"classify {format.percent(selected[0].target)} of n = {selected[0].n} other clean images correctly."
    ]
    for excluded in run.summary.excluded:
        text.append(
            f"Excluded: {run.name(excluded.model)} is estimated to reach at most {format.percent(excluded.most)} "
            "clean accuracy at any alpha."
        )
    rows, radii, colours = [], {}, {}
    for item in selected:
        name = run.name(item.model)
        clean = Cell(format.percent(item.clean_estimate), format.bounds(item))
        rows.append(cells(name, f"{item.sigma:g}", f"{item.alpha:.4g}", clean))
        own = certificates(run.rows, item.model)
        if own:
            radii[name] = theorem_radii(own, item.alpha, "ours")
            colours[name] = run.colours[run.name(item.model, own[0].alpha)]
    caption = "Selected alpha, and the estimated clean accuracy on the images that selected it."
    tables = [Table(caption, ["model", "sigma", "alpha", "clean accuracy, estimated"], rows)]
    if run.summary.frontier:
        tables.append(_best_by_radius(run))
    figures = []
    if radii and run.setting("plan", "decide_radius") is None:
        title = "Certified accuracy of mixtures of equal clean accuracy"
        figures.append(figure("equal-accuracy", title, radii, colours))
    return Section("Alpha and sigma at equal clean accuracy", text, figures, tables)


def _best_by_radius(run: RunView) -> Table:
    rows = []
    for point in run.summary.frontier:
        value = Cell(format.percent(point.value), format.bounds(point))
        radius = format.two_decimals(point.radius)
        rows.append(cells(radius, value, f"{point.sigma:g}", f"{point.alpha:.4g}"))
    caption = "The best mixture at each radius; the exact 95 % intervals do not account for the selection."
    return Table(caption, ["radius", "certified accuracy", "sigma", "alpha"], rows)
