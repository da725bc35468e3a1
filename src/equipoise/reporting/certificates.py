"""Certified accuracy, mixtures of equal clean accuracy, and estimated margins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.certification.mixture import THEOREM_NAMES, THEOREMS, upper_bounds
from equipoise.core import format, stats
from equipoise.core.results import Result, SelectedAlpha
from equipoise.core.rows import (
    CertificateRow,
    MixingRatioRow,
    Mixture,
    Row,
    by_mixture,
    certificates,
)
from equipoise.reporting.charts import (
    OTHERS,
    Chart,
    Histogram,
    Line,
    Panel,
    model_colors,
    percent_range,
)
from equipoise.reporting.section import Cell, RunView, Section, Table, result_label, result_table

Radii = NDArray[
    np.float64
]  # (N,) certified radius of every image, 0 if it is misclassified or abstained
CERTIFIED_AT = "certified@"
METRICS = {
    "acr": "average radius",
    "clean-estimate": "clean, estimated",
    "samples": "noisy samples",
    "true": "votes of the true class",
    "off": "votes of the best other class",
    "ratio": "mixing ratio",
}
CERTIFIED = "certified accuracy, %"
THEOREM_TITLES = {
    "3.5": f"{THEOREM_NAMES['3.5']}, as in Figure 6 of the paper",
    "A.2": f"{THEOREM_NAMES['A.2']}, as in Figure 7 of the paper",
    "lipschitz": "Theorem 3.5 with the smallest Lipschitz constant",
    "ours": "Our radius from the same bounds",
}
LINE_STYLES = ("-", "--", ":", "-.")
FRONTIER_THEOREMS = ("3.5", "A.2", "ours")
# Metrics of estimated margins: how the share was computed, and its line style.
KEPT = {"kept": ("by the Lipschitz estimate", "-"), "attacked-kept": ("at attacked images", "--")}


def _metric_name(metric: str) -> str:
    """A metric in words."""
    name, _, radius = metric.partition("@")
    return f"{METRICS.get(name, name)}{f' at radius {radius}' if radius else ''}"


def radius_of(metric: str) -> float:
    """The radius of "certified@0.25"."""
    return float(metric.partition("@")[2])


def certified(run: RunView) -> Section | None:
    """Certified accuracy of every model against the radius, or at the one that was to be
    decided."""
    models = by_mixture(run.rows)
    if not models:
        return None
    failure, decided = _plan(run).get("failure"), _plan(run).get("decide_radius")
    prose = [
        "An image counts at a radius if it is classified correctly and no perturbation of that Euclidean length, "
        "in units of [0, 1] pixels, can change the prediction. Bands are exact 95 % intervals over n = "
        f"{format.counts(map(len, models.values()))} images."
    ]
    if isinstance(failure, float):
        prose[0] += f" Each certificate may be wrong with probability {failure:g}."
    if decided is not None:
        prose.append(
            f"Sampling stopped as soon as it was decided whether a radius reaches "
            f"{format.two_decimals(decided)}, so that nothing is known about larger and smaller ones."
        )
    elif any(rows[0].alpha is not None for rows in models.values()):
        prose.append(
            "Dotted: radii of Theorem A.2 from the same bounds; ours are never smaller. The radii belong to "
            "the class of the smoothed model, so the curve does not start at the clean accuracy."
        )
    prose += [_attack_check(result) for result in run.summary.results if result.allowed is not None]
    charts = [] if decided is not None else [_certified_chart(models)]
    return Section(
        "Certified accuracy",
        prose,
        _certified_tables(run.summary.results),
        [*charts, *_mixing_ratios(run.rows)],
    )


def radius_axis(longest: float, points: int = 81) -> Radii:
    """(points,) radii from 0 to a little more than the longest one, for a curve."""
    return np.linspace(0, max(1.05 * longest, 0.1), points)


def _certified_chart(models: Mapping[Mixture, list[CertificateRow]]) -> Chart:
    radii = {
        name: np.array([row.radius if row.correct else 0.0 for row in rows])
        for name, rows in models.items()
    }
    at = radius_axis(max(float(own.max(initial=0.0)) for own in radii.values()))
    names, lines = format.mixture_names(models), []
    colors = model_colors(names.values())
    for mixture, rows in models.items():
        name, alpha = names[mixture], mixture[1]
        lines.append(_curve(at, radii[mixture], colors[name], name))
        if alpha is not None:
            lines.append(
                _curve(
                    at,
                    theorem_radii(rows, alpha, "A.2"),
                    colors[name],
                    linestyle=":",
                    interval=False,
                )
            )
    return Chart(
        "certified",
        "Certified accuracy against radius of " + " and ".join(names.values()),
        [Panel(lines, x_range=(0, at[-1]), y_range=percent_range(lines))],
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
    )


def _plan(run: RunView) -> dict[str, Any]:
    """The settings of the certificates, as in `run.toml`."""
    plan = run.identity.get("plan")
    return plan if isinstance(plan, dict) else {}


def theorem_radii(rows: Sequence[CertificateRow], alpha: float | None, theorem: str) -> Radii:
    """Radii of a mixture by one of the theorems, from the same lower bounds; 0 where the smoothed
    model is wrong."""
    lower = np.array([row.lower for row in rows])
    radii = THEOREMS[theorem](
        lower, rows[0].sigma, 1.0 if alpha is None else alpha, upper_bounds(rows)
    )
    return np.where([row.top == row.label for row in rows], radii, 0.0)


def certified_accuracy(radii: Radii, at: Radii) -> list[stats.Estimate]:
    """Share of images certified at each radius; at radius zero every certificate counts."""
    return [
        stats.clopper_pearson(int((radii >= max(radius, 1e-12)).sum()), len(radii)) for radius in at
    ]


def _curve(at: Radii, radii: Radii, color: str, label: str = "", **options: Any) -> Line:
    return Line.of(
        at.tolist(), certified_accuracy(radii, at), color, label, marker="", steps=True, **options
    )


def _certified_tables(results: Sequence[Result]) -> list[Table]:
    at_radius = sorted(
        {result.metric for result in results if result.metric.startswith(CERTIFIED_AT)},
        key=radius_of,
    )
    order = ["acr", *at_radius, "abstained", "clean", "clean-estimate", "samples"]
    own = [result for metric in order for result in results if result.metric == metric]
    shown = [
        _by_metric(
            "Average certified radius (ACR; 0 for misclassified or abstained images), certified accuracy "
            "by radius, abstentions, clean accuracy of the smoothed prediction (for a mixture also "
            "estimated without abstaining) and noisy samples per image, with 95 % intervals"
            if any(result.metric == "acr" for result in own)
            else "Certified accuracy and noisy samples per image, with 95 % intervals",
            own,
        )
    ]
    votes = [
        result
        for result in results
        if result.metric.startswith(("true@", "off@")) or result.metric == "ratio"
    ]
    if votes:
        shown.append(
            _by_metric(
                "Estimated vote shares of the true class and of the best other class under attacks of "
                "growing ℓ2 radius, and mean equal-confidence mixing ratio",
                votes,
                collapsed=True,
            )
        )
    return shown


def _by_metric(caption: str, results: Sequence[Result], *, collapsed: bool = False) -> Table:
    names = format.mixture_names((result.model, result.alpha) for result in results)
    return result_table(
        caption,
        "metric",
        results,
        row=lambda result: _metric_name(result.metric),
        column=lambda result: names[result.model, result.alpha],
        collapsed=collapsed,
    )


def _attack_check(result: Result) -> str:
    """Outcome of an attack inside the certified radii."""
    allowed = result.allowed or 0
    end = (
        f"; the failure probability allows {allowed}"
        if result.count <= allowed
        else f", more than the {allowed} that the failure probability allows"
    )
    return (
        f"Cross-check: the attack {result.metric.removeprefix('broken-')} inside the certified radii of "
        f"{result_label(result)} broke {result.count} of {result.n} certificates{end}."
    )


def _mixing_ratios(rows: Sequence[Row]) -> list[Chart]:
    """Histogram of equal-confidence mixing ratios [SmoothMix, Figure 3]."""
    ratios = defaultdict(list)
    for row in rows:
        if isinstance(row, MixingRatioRow) and row.ratio is not None:
            ratios[row.model].append(row.ratio)
    if not ratios:
        return []
    names, bins = format.short_names(ratios), np.linspace(0, 1, 21).tolist()
    marks = [
        Histogram(
            values=ratios[name],
            bins=bins,
            color=color,
            label=f"{names[name]} (n = {len(ratios[name])})",
            filled=False,
            density=True,
        )
        for name, color in model_colors(ratios).items()
    ]
    return [
        Chart(
            "mixing-ratios",
            "Histograms of estimated equal-confidence mixing ratios of " + " and ".join(ratios),
            [Panel(marks, x_range=(0, 1))],
            x_label="equal-confidence mixing ratio (estimate)",
            y_label="density",
            height=2.6,
        )
    ]


def theorems(run: RunView) -> Section | None:
    """Certified accuracy of mixtures at several alphas by every theorem [Bai2024, Figure 3], from
    the same votes."""
    results = run.summary.theorems
    names = format.mixture_names((item.model, item.alpha) for item in results)
    if len(names) == len({item.model for item in results}):
        return None
    mixtures = by_mixture(run.rows)
    longest = max(
        float(theorem_radii(mixtures[mixture], mixture[1], "ours").max(initial=0.0))
        for mixture in names
    )
    at = radius_axis(longest)
    # Three colours in turn, with another line style after each turn.
    colors = model_colors(names.values())
    styles = {
        name: LINE_STYLES[number // len(OTHERS) % len(LINE_STYLES)]
        for number, name in enumerate(colors)
    }
    panels = [
        Panel(
            [
                _curve(
                    at,
                    theorem_radii(mixtures[mixture], mixture[1], theorem),
                    colors[name],
                    name,
                    linestyle=styles[name],
                    width=1.6,
                    interval=False,
                )
                for mixture, name in names.items()
            ],
            title=title,
            x_range=(0, at[-1]),
            y_range=(0, 103),
        )
        for theorem, title in THEOREM_TITLES.items()
    ]
    alt = "Certified accuracy against radius by every theorem, for " + " and ".join(names.values())
    chart = Chart(
        "certified-theorems", alt, panels, x_label="ℓ2 radius", y_label=CERTIFIED, height=8.0
    )
    tables = [
        result_table(
            f"{THEOREM_TITLES[theorem]}: average certified radius and certified accuracy by radius, "
            "with 95 % intervals",
            "mixture",
            [item for item in results if item.theorem == theorem],
            row=lambda item: names[item.model, item.alpha],
            column=lambda item: item.metric,
            collapsed=theorem != "ours",
        )
        for theorem in reversed(THEOREM_TITLES)
    ]
    prose = [
        "All alphas and all theorems use the same confidence bounds, which hold together with the failure "
        "probability of one certificate. Our radius is never smaller than the others."
    ]
    return Section("Mixtures by alpha and theorem", prose, tables, [chart])


def frontier(run: RunView) -> Section | None:
    """Certified accuracy of mixtures of one clean accuracy, alpha and sigma varied together
    [Bai2024, Figures 6, 7]."""
    selected = run.summary.selected_alphas
    if not selected:
        return None
    prose = [
        "More noise certifies larger radii but lowers clean accuracy; a smaller alpha compensates. Each smoothed "
        "model is mixed with the same accurate model, at the largest alpha with which the mixture is estimated to "
        f"classify {format.percent(selected[0].target)} of n = {selected[0].n} other clean images correctly."
    ]
    charts = []
    if "decide_radius" not in _plan(run):
        prose.append(
            "Solid: mixtures. Dashed: their smoothed models alone, from the same votes. Grey: the best "
            "mixture at each radius, selected on these images. All three theorems use the same confidence "
            "bounds, where the paper uses means."
        )
        charts.append(
            _frontier_chart(run, {format.label(item.model, item.alpha): item for item in selected})
        )
    prose += [
        f"Excluded: {run.name(item.model)} is estimated to reach at most {format.percent(item.most)} clean "
        "accuracy at any alpha."
        for item in run.summary.excluded
    ]
    alphas = [
        [
            Cell(run.name(item.model)),
            Cell(f"{item.sigma:g}"),
            Cell(f"{item.alpha:.4g}"),
            Cell(format.percent(item.clean_estimate), format.bounds(item)),
        ]
        for item in selected
    ]
    best = [
        [
            Cell(format.two_decimals(point.radius)),
            Cell(format.percent(point.value), format.bounds(point)),
            Cell(f"{point.sigma:g}"),
            Cell(f"{point.alpha:.4g}"),
        ]
        for point in run.summary.frontier
    ]
    return Section(
        "Alpha and sigma at equal clean accuracy",
        prose,
        [
            Table(
                "Selected alpha, and the estimated clean accuracy on the images that selected it.",
                ["model", "sigma", "alpha", "clean, estimate"],
                alphas,
            ),
            Table(
                "The best mixture at each radius; the exact 95 % intervals do not account for the selection.",
                ["radius", "certified accuracy", "sigma", "alpha"],
                best,
            ),
        ],
        charts,
    )


def _frontier_chart(run: RunView, mixtures: dict[str, SelectedAlpha]) -> Chart:
    rows = {name: certificates(run.rows, item.model) for name, item in mixtures.items()}
    longest = max(
        float(theorem_radii(rows[name], 1.0, "ours").max(initial=0.0)) for name in mixtures
    )
    at = radius_axis(longest, points=162)
    names = format.short_names(mixtures)
    panels = []
    for theorem in FRONTIER_THEOREMS:
        lines = []
        for name, color in model_colors(mixtures).items():
            lines += [
                _curve(
                    at,
                    theorem_radii(rows[name], alpha, theorem),
                    color,
                    label,
                    linestyle=linestyle,
                    width=width,
                    interval=False,
                )
                for alpha, label, linestyle, width in (
                    (mixtures[name].alpha, names[name], "-", 1.6),
                    (1.0, "", "--", 1.0),
                )
            ]
        highest = np.max([line.y for line in lines[::2]], axis=0).tolist()
        lines.insert(
            0,
            Line(
                x=at.tolist(),
                y=highest,
                color="muted",
                label="best mixture",
                width=5,
                opacity=0.35,
                marker="",
                steps=True,
            ),
        )
        panels.append(
            Panel(lines, title=THEOREM_TITLES[theorem], x_range=(0, at[-1]), y_range=(0, 103))
        )
    return Chart(
        "frontier",
        "Certified accuracy against radius by three theorems, for " + " and ".join(mixtures),
        panels,
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
        height=6.2,
    )


def estimates(run: RunView) -> Section | None:
    """Local Lipschitz constants [Bai2024, (C.1)] and the images whose margin no accurate model can
    overcome."""
    if (part := run.subrun("estimate")) is None:
        return None
    results = part.summary.results
    constants = {result.model: result for result in results if result.metric == "lipschitz"}
    prose = [
        "A mixture keeps the robust model's class where the margin that is left in the ball is at least "
        "(1 − alpha) / alpha. These are estimates, not certificates: the search may have missed the worst point. "
        "The Lipschitz estimate assumes that every class is at its worst at once; attacked images are single "
        "points.",
        f"For each of n = {next(iter(constants.values())).n} images, a gradient search of the ball ({run.threat}) "
        "measures how far the probability of the predicted class can fall and that of each other class can rise. "
        "Divided by the radius and averaged over classes, this is the local Lipschitz constant.",
    ]
    table = result_table(
        "Estimated local Lipschitz constant, smallest margin in the ball according to it, and smallest margin under "
        "the attacks of this run: mean over images with 95 % intervals",
        "model",
        results,
        columns=("lipschitz", "margin", "attacked-margin"),
    )
    lines = kept_lines(results)
    alt = (
        "Estimated share of images whose class a mixture keeps against alpha, for "
        + " and ".join(constants)
    )
    chart = Chart(
        "estimates",
        alt,
        [Panel(lines, y_range=percent_range(lines))],
        x_label="alpha",
        y_label="correct and kept (estimate), %",
    )
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
    return [
        Line.of(
            [alpha for alpha, _ in points],
            [result for _, result in points],
            colors[model],
            f"{names[model]}, {KEPT[metric][0]}",
            linestyle=KEPT[metric][1],
        )
        for (model, metric), points in curves.items()
    ]
