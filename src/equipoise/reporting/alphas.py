"""Mixtures without a gate: accuracy against alpha, which base an attack breaks, and how confident
both bases are."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result
from equipoise.core.rows import AttackRow
from equipoise.reporting.charts import CORRECT, Chart, Line, LineStyle, Panel, percent_range
from equipoise.reporting.local_smoothing import strength, strength_chart, strength_line
from equipoise.reporting.section import (
    INTERVALS,
    MISSING,
    SAME_NUMBERS,
    Cell,
    RunView,
    Section,
    Table,
    model_cell,
    result_cell,
    result_table,
)

STUDY = "adaptive-smoothing"
# Metrics of a sweep with transferred attacks: label, colour and line style. The attack on the
# mixture may have several versions, which all begin with its name.
STD, ROB, MIX = "std", "rob", "mix"
LINES: dict[str, tuple[str, str, LineStyle]] = {
    CLEAN: ("clean", "mixed", "-"),
    STD: ("attack on the accurate model", "accurate", ":"),
    ROB: ("attack on the robust model", "robust", "-."),
    MIX: ("attack on the mixture", "ink", "--"),
}
WHAT_ALPHA_IS = (
    "Alpha is the weight of the robust model: at 0 the mixture is the accurate model, at 1 the robust "
    "model."
)


def alpha_sweep(run: RunView) -> Section | None:
    """Accuracy of the mixture at every alpha of the run, or of that in `sweep/` or `alphas/`."""
    sweep = run if run.curve("mixed", CLEAN) else run.subrun("sweep") or run.subrun("alphas", STUDY)
    if sweep is None or not sweep.curve("mixed", CLEAN):
        return None
    if sweep.curve("mixed", STD):
        return _three_attacks(sweep)
    curves = {metric: sweep.curve("mixed", metric) for metric in (CLEAN, WORST)}
    results = [result for curve in curves.values() for result in curve]
    prose = [f"{WHAT_ALPHA_IS} {_counted(results)}"]
    if run.summary.fit is not None:
        prose.append(
            "This is plain mixing without the fitted logit map, measured on fitting images under a short "
            "attack. It shows the trade-off that alpha alone offers."
        )
    lines = [
        Line.of(
            [result.alpha or 0.0 for result in curve],
            curve,
            "mixed",
            metric,
            linestyle="-" if metric == CLEAN else "--",
        )
        for metric, curve in curves.items()
    ]
    return _section(
        sweep, prose, lines, results, "Clean and worst-case accuracy of the mixture against alpha"
    )


def _three_attacks(sweep: RunView) -> Section:
    mix = sorted(
        {result.metric for result in sweep.summary.results if result.metric.split("-")[0] == MIX}
    )
    curves = {metric: sweep.curve("mixed", metric) for metric in (CLEAN, STD, ROB, *mix)}
    prose = [
        strongest(sweep, mix),
        f"{WHAT_ALPHA_IS} {_counted(curves[CLEAN])} The images of the attacks on the "
        "accurate and on the robust model, by PGD, are the same for all alphas; the attack on the mixture is a "
        "new one at every alpha.",
    ]
    lines = []
    for metric, curve in curves.items():
        label, color, linestyle = LINES[metric.split("-")[0]]
        version = metric.partition("-")[2]
        lines.append(
            Line.of(
                [result.alpha or 0.0 for result in curve],
                curve,
                "muted" if version else color,
                f"{label}, {version}" if version else label,
                linestyle=linestyle,
            )
        )
    results = [
        *(result for curve in curves.values() for result in curve),
        *sweep.curve("mixed", WORST),
    ]
    return _section(
        sweep,
        prose,
        lines,
        results,
        "Accuracy of the mixture against alpha, clean and under three attacks",
    )


def strongest(sweep: RunView, mix: Sequence[str]) -> str:
    """At which alphas a transferred attack leaves less than the attack on the mixture itself."""
    own = {
        alpha: min(
            result.value
            for metric in mix
            for result in sweep.curve("mixed", metric)
            if result.alpha == alpha
        )
        for alpha in (result.alpha for result in sweep.curve("mixed", CLEAN))
    }
    weaker = sorted(
        {
            result.alpha
            for metric in (STD, ROB)
            for result in sweep.curve("mixed", metric)
            if result.alpha is not None and result.value < own[result.alpha]
        }
    )
    if not weaker:
        return "The attack on the mixture itself leaves the lowest accuracy at every alpha."
    listed = ", ".join(f"{alpha:g}" for alpha in weaker)
    return (
        f"At alpha {listed} an attack on one of the two models alone leaves a lower accuracy than the attack on "
        "the mixture itself, whose gradients may be masked there or which may be too short. At every other alpha "
        "the attack on the mixture leaves the lowest accuracy."
        if len(weaker) < len(own)
        else "At every alpha an attack on one of the two models alone leaves a lower accuracy than the attack on the "
        "mixture itself, whose gradients may be masked or which may be too short."
    )


def _counted(results: Sequence[Result]) -> str:
    return (
        f"Each point is the mixture at one alpha on n = {format.counts(result.n for result in results)} images; "
        "bands are exact 95 % intervals."
    )


def _section(
    sweep: RunView, prose: Sequence[str], lines: Sequence[Line], results: Sequence[Result], alt: str
) -> Section:
    chart = Chart(
        "alpha",
        alt,
        [Panel(lines, x_range=(-0.02, 1.02), y_range=percent_range(lines))],
        x_label="alpha",
        y_label=CORRECT,
    )
    table = result_table(
        SAME_NUMBERS, "alpha", results, row=lambda result: f"{result.alpha:g}", collapsed=True
    )
    if (trade_off := _trade_off(sweep)) is None:
        return Section("Accuracy against alpha", prose, [table], [chart])
    return Section(
        "Accuracy against alpha",
        [
            *prose,
            "The second figure shows the worst case over all attacks against "
            "clean accuracy, with alpha beside each point; further up and to the "
            "right is better.",
        ],
        [table],
        [chart, trade_off],
    )


def _trade_off(sweep: RunView) -> Chart | None:
    """Worst-case accuracy against clean accuracy, a point for every alpha; None unless all were
    attacked."""
    clean, worst = (sweep.curve("mixed", metric) for metric in (CLEAN, WORST))
    if [result.alpha for result in clean] != [result.alpha for result in worst]:
        return None
    low, x, high = (
        [100 * getattr(result, name) for result in clean] for name in ("low", "value", "high")
    )
    line = Line.of(
        x,
        worst,
        "mixed",
        "mixture",
        bars=True,
        x_low=low,
        x_high=high,
        texts=[f"{result.alpha:g}" for result in clean],
    )
    return Chart(
        "alpha-trade-off",
        "Worst-case accuracy of the mixture against its clean accuracy, at every alpha",
        [Panel([line], x_range=(max(0.0, min(low) - 1), min(103.0, max(high) + 1)))],
        x_label="clean accuracy, %",
        y_label="worst case over all attacks, %",
    )


def transfer(run: RunView) -> Section | None:
    """Accuracy of both models on images of attacks on the mixture, against its alpha [Bai2024,
    Figure 2]."""
    if (part := run.subrun("transfer", STUDY)) is None or (
        crossing := part.summary.crossing
    ) is None:
        return None
    alpha = crossing.gamma / (1 + crossing.gamma)
    where = (
        f"Up to alpha {alpha:.4g} (log-odds {math.log(crossing.gamma):.2f}; 95 % of resampled image sets: "
        f"{math.log(crossing.low):.2f} to {math.log(crossing.high):.2f}) the robust model classifies more of "
        "these images correctly, above it the accurate model does."
        if crossing.met
        else "The accuracies of both models do not cross at these alphas."
    )
    prose = [
        f"{where} Each point is PGD on the mixture with one alpha, judged by either model alone on n = "
        f"{part.summary.results[0].n} images. The axis has the odds α/(1 − α), whose logarithm the paper shows: "
        "the attack on the accurate model is at 0, that on the robust model at ∞."
    ]
    curves = {model: part.curve(model, "transfer") for model in ("accurate", "robust")}
    lines = [strength_line(curve, model, f"{model} model") for model, curve in curves.items()]
    chart = strength_chart(
        "transfer",
        "Accuracy of both models against the odds of the attacked mixture",
        lines,
        [strength(result) for result in curves["accurate"]],
        x_label="odds α/(1 − α) of the attacked mixture",
    )
    table = result_table(
        SAME_NUMBERS,
        "alpha of the attacked mixture",
        [*curves["accurate"], *curves["robust"]],
        row=lambda result: f"{result.alpha:.4g}",
        column=lambda result: result.model,
        collapsed=True,
    )
    return Section("Which model an attack on the mixture breaks", prose, [table], [chart])


def confidence(run: RunView) -> Section | None:
    """Mean gap between the first two probabilities, of correct and of wrong predictions [Bai2024,
    Table 1]."""
    if (part := run.subrun("confidence", STUDY)) is None:
        return None
    gaps: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row in part.rows:
        if isinstance(row, AttackRow) and row.top_gap is not None:
            gaps[row.model, row.attack, row.correct].append(row.top_gap)
    attacks = {CLEAN: "clean", "pgd": "PGD", "smallest-margin": "smallest margin"}
    body = []
    for model in ("accurate", "robust"):
        cells = [model_cell(model)]
        for attack in attacks:
            result = part.find(model, attack)
            cells.append(MISSING if result is None else result_cell(result))
            cells += [_mean_cell(gaps[model, attack, correct]) for correct in (True, False)]
        body.append(cells)
    prose = [
        "Mixing helps where the robust model is confident when it is right under attack and unsure when it is "
        "wrong on clean images. The gap is the probability of the predicted class minus that of the runner-up, "
        "whichever class is the true one; means, with the median and the number of images below.",
        "PGD ends at its last step on every image. The smallest margin is that over all iterates of the two APGD "
        "attacks of AutoAttack; images that the first breaks are not attacked by the second.",
    ]
    head = [
        "model",
        *(
            f"{name}{column}"
            for name in attacks.values()
            for column in ("", ": gap where correct", ": gap where wrong")
        ),
    ]
    return Section(
        "Confidence of both models", prose, [Table(f"{INTERVALS}, and mean gaps.", head, body)]
    )


def _mean_cell(values: Sequence[float]) -> Cell:
    if not values:
        return MISSING
    return Cell(
        format.number(statistics.fmean(values), 3),
        f"median {format.number(statistics.median(values), 3)}, n = {len(values)}",
    )
