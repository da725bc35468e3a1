"""Certified accuracy, mixtures of equal clean accuracy, and estimated margins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.certification.mixture import THEOREMS
from equipoise.core import format, stats
from equipoise.core.results import Result
from equipoise.core.rows import CERTIFY, CertificateRow, MixingRatioRow, Row
from equipoise.reporting.charts import Chart, Histogram, Line, Panel, model_colors
from equipoise.reporting.section import Cell, RunView, Section, Table, result_label, result_table

Radii = NDArray[np.float64]  # (N,) certified radius of every image, 0 if it is misclassified or abstained
GRID = 81
CERTIFIED = "certified accuracy, %"
THEOREM_TITLES = {"3.5": "Theorem 3.5, as in Figure 6 of the paper", "A.2": "Theorem A.2, as in Figure 7 of the paper",
                  "ours": "Our radius from the same bounds"}
# Metrics of estimated margins: how the share was computed, and its line style.
KEPT = {"kept": ("by the Lipschitz estimate", "-"), "attacked-kept": ("at attacked images", "--")}


def certified(run: RunView) -> Section | None:
    """Certified accuracy of every model against the radius."""
    models = collect(run.rows)
    if not models:
        return None
    radii = {name: np.array([row.radius if row.correct else 0.0 for row in rows]) for name, rows in models.items()}
    paper = {name: theorem_radii(rows, rows[0].alpha, "A.2") for name, rows in models.items()
             if rows[0].alpha is not None}
    prose = ["An image counts at a radius if it is classified correctly and no perturbation of that Euclidean length, "
             "in units of [0, 1] pixels, can change the prediction. Bands are exact 95 % intervals over n = "
             f"{format.counts(map(len, models.values()))} images."]
    plan = run.identity.get("plan")
    failure = plan.get("failure") if isinstance(plan, dict) else None
    if isinstance(failure, float):
        prose[0] += f" Each certificate may be wrong with probability {failure:g}."
    if paper:
        prose.append("Dotted: radii of Theorem A.2 from the same bounds; ours are never smaller. The radii belong to "
                     "the class of the smoothed model, so the curve does not start at the clean accuracy.")
    prose += [_attack_check(result) for result in run.summary.results if result.allowed is not None]
    at = np.linspace(0, max(1.05 * max(float(own.max(initial=0.0)) for own in radii.values()), 0.1), GRID)
    names, lines = format.short_names(models), []
    for name, color in model_colors(models).items():
        lines.append(_curve(at, radii[name], color, names[name]))
        if name in paper:
            lines.append(_curve(at, paper[name], color, linestyle=":", interval=False))
    chart = Chart("certified", "Certified accuracy against radius of " + " and ".join(models),
                  [Panel(lines, x_range=(0, at[-1]), y_range=(0, 103))], x_label="ℓ2 radius", y_label=CERTIFIED)
    return Section("Certified accuracy", prose, _certified_tables(run.summary.results),
                   [chart, *_mixing_ratios(run.rows)])


def collect(rows: Sequence[Row]) -> dict[str, list[CertificateRow]]:
    """Certificates by model and alpha."""
    models = defaultdict(list)
    for row in rows:
        if isinstance(row, CertificateRow) and row.attack == CERTIFY:
            models[format.label(row.model, row.alpha)].append(row)
    return models


def theorem_radii(rows: Sequence[CertificateRow], alpha: float | None, theorem: str) -> Radii:
    """Radii of a mixture by one of the theorems, from the same lower bounds; 0 where the smoothed model is wrong."""
    lower = np.array([row.lower for row in rows])
    radii = THEOREMS[theorem](lower, rows[0].sigma, 1.0 if alpha is None else alpha)
    return np.where([row.top == row.label for row in rows], radii, 0.0)


def certified_accuracy(radii: Radii, at: Radii) -> list[stats.Estimate]:
    """Share of images certified at each radius; at radius zero every certificate counts."""
    return [stats.clopper_pearson(int((radii >= max(radius, 1e-12)).sum()), len(radii)) for radius in at]


def _curve(at: Radii, radii: Radii, color: str, label: str = "", **options: Any) -> Line:
    return Line.of(at.tolist(), certified_accuracy(radii, at), color, label, marker="", steps=True, **options)


def _certified_tables(results: Sequence[Result]) -> list[Table]:
    at_radius = sorted({result.metric for result in results if result.metric.startswith("certified@")},
                       key=lambda metric: float(metric.partition("@")[2]))
    order = ["acr", *at_radius, "abstained", "clean", "clean-estimate", "samples"]
    own = [result for metric in order for result in results if result.metric == metric]
    shown = [_by_metric("Average certified radius (ACR; 0 for misclassified or abstained images), certified accuracy "
                        "by radius, abstentions, clean accuracy of the smoothed prediction (for a mixture also "
                        "estimated without abstaining) and noisy samples per image, with 95 % intervals", own)]
    votes = [result for result in results if result.metric.startswith(("true@", "off@")) or result.metric == "ratio"]
    if votes:
        shown.append(_by_metric("Estimated vote shares of the true class and of the best other class under attacks of "
                                "growing ℓ2 radius, and mean equal-confidence mixing ratio", votes, collapsed=True))
    return shown


def _by_metric(caption: str, results: Sequence[Result], *, collapsed: bool = False) -> Table:
    names = format.short_names(map(result_label, results))
    return result_table(caption, "metric", results, row=lambda result: result.metric,
                        column=lambda result: names[result_label(result)], collapsed=collapsed)


def _attack_check(result: Result) -> str:
    """Outcome of an attack inside the certified radii."""
    allowed = result.allowed or 0
    end = (f"; the failure probability allows {allowed}" if result.count <= allowed else
           f", more than the {allowed} that the failure probability allows")
    return (f"Cross-check: the attack {result.metric.removeprefix('broken-')} inside the certified radii of "
            f"{result_label(result)} broke {result.count} of {result.n} certificates{end}.")


def _mixing_ratios(rows: Sequence[Row]) -> list[Chart]:
    """Histogram of equal-confidence mixing ratios [SmoothMix, Figure 3]."""
    ratios = defaultdict(list)
    for row in rows:
        if isinstance(row, MixingRatioRow) and row.ratio is not None:
            ratios[row.model].append(row.ratio)
    if not ratios:
        return []
    names, bins = format.short_names(ratios), np.linspace(0, 1, 21).tolist()
    marks = [Histogram(values=ratios[name], bins=bins, color=color, label=f"{names[name]} (n = {len(ratios[name])})",
                       filled=False, density=True) for name, color in model_colors(ratios).items()]
    return [Chart("mixing-ratios", "Histograms of estimated equal-confidence mixing ratios of " + " and ".join(ratios),
                  [Panel(marks, x_range=(0, 1))], x_label="equal-confidence mixing ratio (estimate)",
                  y_label="density", height=2.6)]


def frontier(run: RunView) -> Section | None:
    """Certified accuracy of mixtures of one clean accuracy, alpha and sigma varied together [Bai2024, Figures 6, 7]."""
    selected = run.summary.selected_alphas
    if not selected:
        return None
    mixtures = {format.label(item.model, item.alpha): item for item in selected}
    prose = ["More noise certifies larger radii but lowers clean accuracy; a smaller alpha compensates. Each smoothed "
             "model is mixed with the same accurate model, at the largest alpha with which the mixture is estimated to "
             f"classify {format.percent(selected[0].target)} of n = {selected[0].n} other clean images correctly.",
             "Solid: mixtures. Dashed: their smoothed models alone, from the same votes. Grey: the best mixture at "
             "each radius, selected on these images. All three theorems use the same confidence bounds, where the "
             "paper uses means."]
    prose += [f"Excluded: {item.model} is estimated to reach at most {format.percent(item.most)} clean accuracy at any "
              "alpha." for item in run.summary.excluded]
    certificates = [row for own in collect(run.rows).values() for row in own]
    rows = {name: [row for row in certificates if row.model == item.model] for name, item in mixtures.items()}
    longest = max(float(theorem_radii(rows[name], 1.0, "ours").max(initial=0.0)) for name in mixtures)
    at = np.linspace(0, max(1.05 * longest, 0.1), 2 * GRID)
    names = format.short_names(mixtures)
    panels = []
    for theorem, title in THEOREM_TITLES.items():
        lines = []
        for name, color in model_colors(mixtures).items():
            lines += [_curve(at, theorem_radii(rows[name], alpha, theorem), color, label, linestyle=linestyle,
                             width=width, interval=False)
                      for alpha, label, linestyle, width in ((mixtures[name].alpha, names[name], "-", 1.6),
                                                             (1.0, "", "--", 1.0))]
        highest = np.max([line.y for line in lines[::2]], axis=0).tolist()
        lines.insert(0, Line(x=at.tolist(), y=highest, color="muted", label="best mixture", width=5, opacity=0.35,
                             marker="", steps=True))
        panels.append(Panel(lines, title=title, x_range=(0, at[-1]), y_range=(0, 103)))
    chart = Chart("frontier", "Certified accuracy against radius by three theorems, for " + " and ".join(mixtures),
                  panels, x_label="ℓ2 radius", y_label=CERTIFIED, height=6.2)
    alphas = [[Cell(item.model), Cell(f"{item.sigma:g}"), Cell(f"{item.alpha:.4g}"),
               Cell(format.percent(item.clean_estimate), format.bounds(item))] for item in selected]
    best = [[Cell(f"{point.radius:.2f}"), Cell(format.percent(point.value), format.bounds(point)),
             Cell(f"{point.sigma:g}"), Cell(f"{point.alpha:.4g}")] for point in run.summary.frontier]
    return Section("Alpha and sigma at equal clean accuracy", prose, [
        Table("Selected alpha, and the estimated clean accuracy on the images that selected it.",
              ["model", "sigma", "alpha", "clean, estimate"], alphas),
        Table("The best mixture at each radius; the exact 95 % intervals do not account for the selection.",
              ["radius", "certified accuracy", "sigma", "alpha"], best)], [chart])


def estimates(run: RunView) -> Section | None:
    """Local Lipschitz constants [Bai2024, (C.1)] and the images whose margin no accurate model can overcome."""
    if (part := run.subrun("estimate")) is None:
        return None
    results = part.summary.results
    constants = {result.model: result for result in results if result.metric == "lipschitz"}
    prose = ["A mixture keeps the robust model's class where the margin that is left in the ball is at least "
             "(1 − alpha) / alpha. These are estimates, not certificates: the search may have missed the worst point. "
             "The Lipschitz estimate assumes that every class is at its worst at once; attacked images are single "
             "points.",
             f"For each of n = {next(iter(constants.values())).n} images, a gradient search of the ball ({run.threat}) "
             "measures how far the probability of the predicted class can fall and that of each other class can rise. "
             "Divided by the radius and averaged over classes, this is the local Lipschitz constant."]
    table = result_table(
        "Estimated local Lipschitz constant, smallest margin in the ball according to it, and smallest margin under "
        "the attacks of this run: mean over images with 95 % intervals", "model", results,
        columns=("lipschitz", "margin", "attacked-margin"))
    alt = "Estimated share of images whose class a mixture keeps against alpha, for " + " and ".join(constants)
    chart = Chart("estimates", alt, [Panel(kept_lines(results), y_range=(0, 103))], x_label="alpha",
                  y_label="correct and kept (estimate), %")
    return Section("Estimated margins", prose, [table], [chart])


def kept_lines(results: Sequence[Result]) -> list[Line]:
    """Share of images kept against alpha, by model and by how it was computed."""
    curves: dict[tuple[str, str], list[tuple[float, Result]]] = {}
    for result in results:
        metric, _, alpha = result.metric.rpartition("@")
        if metric in KEPT:
            curves.setdefault((result.model, metric), []).append((float(alpha), result))
    colors = model_colors(dict.fromkeys(model for model, _ in curves))
    names = format.short_names(colors)
    return [Line.of([alpha for alpha, _ in points], [result for _, result in points], colors[model],
                    f"{names[model]}, {KEPT[metric][0]}", linestyle=KEPT[metric][1])
            for (model, metric), points in curves.items()]
