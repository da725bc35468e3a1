"""Mixtures at several alphas: accuracy against alpha, and the trade-off."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result
from equipoise.reporting.charts import CORRECT, Chart, Line, LineStyle, Panel, percent_range
from equipoise.reporting.section import (
    SAME_NUMBERS,
    RunView,
    Section,
    result_table,
)

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
    """Accuracy of the mixture at every alpha of the run, or of that in `sweep/`."""
    sweep = run if run.curve("mixed", CLEAN) else run.subrun("sweep")
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
