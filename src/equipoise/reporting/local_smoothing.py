"""Locally biased smoothing with a fixed strength γ: trust terms, a fixed strength, nearest
neighbours as the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result
from equipoise.reporting.charts import (
    CORRECT,
    OTHERS,
    Chart,
    Line,
    LineStyle,
    Panel,
    Point,
    ReferenceLine,
)
from equipoise.reporting.section import SAME_NUMBERS, RunView, Section, Table, result_table

STUDY = "local-smoothing"
BEST = "constant, probabilities"
RATIO = "ratio, logits"
# Attacks on the ratio rule: label, the metric of the accurate model at γ = 0 and of the robust
# model at γ = ∞, colour and line style.
ATTACKS: dict[str, tuple[str, str, str, str, LineStyle]] = {
    "clean": ("clean", "clean", "clean", "mixed", "-"),
    "pgd-std": ("attack on the accurate model", "pgd", "", "accurate", ":"),
    "pgd-rob": ("attack on the robust model", "", "pgd", "robust", "-."),
    "pgd": ("attack on the rule", "pgd", "pgd", "ink", "--"),
    "pgd-soft": ("attack on the rule, softplus", "", "", "muted", (0, (1, 1))),
}


def strength(result: Result) -> float:
    """The strength γ of a result, whose alpha is γ / (1 + γ)."""
    alpha = result.alpha or 0.0
    return math.inf if alpha >= 1 else alpha / (1 - alpha)


def positions(strengths: Sequence[float]) -> dict[float, float]:
    """γ → position on an axis of log₁₀ γ; 0 and ∞ are one unit beyond their neighbours."""
    logs = {gamma: math.log10(gamma) for gamma in strengths if 0 < gamma < math.inf}
    ends = {0.0: min(logs.values()) - 1, math.inf: max(logs.values()) + 1}
    return {gamma: logs[gamma] if gamma in logs else ends[gamma] for gamma in strengths}


def strength_ticks(strengths: Sequence[float], most: int = 5) -> dict[float, str]:
    """Ticks at about `most` powers of ten, and at 0 and ∞ where they occur."""
    at = positions(strengths)
    inner = [x for gamma, x in at.items() if 0 < gamma < math.inf]
    step = max(1, math.ceil((max(inner) - min(inner)) / most))
    powers = range(math.ceil(min(inner) - 0.01), math.floor(max(inner) + 0.01) + 1, step)
    ticks = {float(x): f"{10.0**x:g}" for x in powers}
    return ticks | {at[gamma]: text for gamma, text in ((0.0, "0"), (math.inf, "∞")) if gamma in at}


def strength_line(
    results: Sequence[Result], color: str, label: str, linestyle: LineStyle = "-"
) -> Line:
    """Accuracy with its interval against the strength."""
    strengths = [strength(result) for result in results]
    at = positions(strengths)
    return Line.of([at[gamma] for gamma in strengths], results, color, label, linestyle=linestyle)


def strength_chart(
    name: str,
    alt: str,
    lines: Sequence[Line],
    strengths: Sequence[float],
    *,
    x_label: str = "strength γ",
    references: Sequence[ReferenceLine] = (),
) -> Chart:
    """Accuracies against the strength in one panel."""
    panel = Panel([*lines, *references], x_ticks=strength_ticks(strengths))
    return Chart(name, alt, [panel], x_label=x_label, y_label=CORRECT)


def trust(run: RunView) -> Section | None:
    """Clean against attacked accuracy for every trust term [Bai2024, Figure 1]."""
    if (part := run.subrun("trust", STUDY)) is None:
        return None
    prose = [
        envelope(part),
        f"Each point is one strength of one rule on n = {part.summary.results[0].n} images. The trust term R is "
        "constant, the gradient of each class, the gradient of the top class, or the ratio of the two models' "
        "gradients. Solid lines mix probabilities, dashed lines logits.",
        "Attacked accuracy is the worst case over attacks on the rule, on the rule with softplus in the backward "
        "pass (the gradient norm of a ReLU network has zero gradient), on the accurate and on the robust model.",
    ]
    models = part.swept_models()
    terms = list(dict.fromkeys(model.split(",")[0] for model in models))
    colors = dict(zip(terms, ("mixed", *OTHERS, "wrong"), strict=False))
    lines = []
    for model in models:
        term, _, space = model.partition(", ")
        lines.append(
            Line.of(
                [100 * result.value for result in part.curve(model, CLEAN)],
                part.curve(model, WORST),
                colors[term],
                model,
                interval=False,
                linestyle="-" if space == "probabilities" else "--",
            )
        )
    points = [
        Point(x=100 * clean, y=100 * worst, text=base, color=base)
        for base, (clean, worst) in _bases(part).items()
    ]
    chart = Chart(
        "trust",
        "Attacked against clean accuracy for four trust terms over logits and probabilities",
        [Panel([*lines, *points])],
        x_label="clean accuracy, %",
        y_label="attacked accuracy, %",
        height=3.6,
    )
    table = _numbers(part, (CLEAN, "pgd", "pgd-soft", "pgd-std", "pgd-rob", WORST))
    return Section("Trust terms", prose, [table], [chart])


def _bases(part: RunView) -> dict[str, tuple[float, float]]:
    """Clean and worst-case accuracy of the base models alone, where both were measured."""
    results = {
        base: (part.find(base, CLEAN), part.find(base, WORST)) for base in ("accurate", "robust")
    }
    return {
        base: (clean.value, worst.value)
        for base, (clean, worst) in results.items()
        if clean and worst
    }


def envelope(part: RunView) -> str:
    """Whether constant trust over probabilities is the upper envelope, and where it is not."""
    pairs = {
        model: list(zip(part.curve(model, CLEAN), part.curve(model, WORST), strict=True))
        for model in part.swept_models()
    }
    line = sorted(
        [
            *((clean.value, worst.value) for clean, worst in pairs.pop(BEST, [])),
            *_bases(part).values(),
        ]
    )
    above = []
    for model, curve in pairs.items():
        for clean, worst in curve:
            excess = worst.value - _height(line, clean.value)
            if excess > 0:
                beyond = ", beyond its accurate end" if clean.value > line[-1][0] else ""
                is_clear = excess > (worst.high - worst.low) / 2
                above.append((excess, is_clear, f"{model} at γ = {strength(clean):.3g}{beyond}"))
    if not above:
        return "Constant trust over probabilities is the upper envelope: no other rule has a point above its line."
    largest, _, where = max(above)
    count = (
        "1 point of another rule lies"
        if len(above) == 1
        else f"{len(above)} points of other rules lie"
    )
    clear = [text for _, is_clear, text in above if is_clear]
    return (
        f"Constant trust over probabilities is not the upper envelope everywhere: {count} above its line, by at "
        f"most {format.number(100 * largest, 1)} points ({where}). "
        + (
            f"By more than the half-width of their intervals: {', '.join(clear)}."
            if clear
            else "None by more than the half-width of its interval."
        )
    )


def _height(line: Sequence[tuple[float, float]], clean: float) -> float:
    """The largest attacked accuracy of the line at this clean accuracy or a higher one; 0 beyond
    its end."""
    best = max((attacked for own, attacked in line if own >= clean), default=0.0)
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= clean <= x1 and x1 > x0:
            best = max(best, y0 + (y1 - y0) * (clean - x0) / (x1 - x0))
    return best


def fixed_strength(run: RunView) -> Section | None:
    """The ratio rule under attacks on g, on h and on the rule itself, against γ [Bai2022, Figure
    6]."""
    part = run.subrun("trust", STUDY)
    if part is None or not part.curve(RATIO, "pgd"):
        return None
    prose = [
        "Attacks on the accurate model are effective at small strengths, attacks on the robust model at large "
        "ones. The attack on the rule itself should lie below both, unless gradients are masked. The ratio rule "
        "over logits is that of the first paper: the accurate model at γ = 0, the robust model at γ = ∞."
    ]
    lines = [
        strength_line(curve, color, label, linestyle=linestyle)
        for metric, (label, _, _, color, linestyle) in ATTACKS.items()
        if (curve := curve_with_ends(part, RATIO, metric))
    ]
    chart = strength_chart(
        "fixed-strength",
        "Accuracy of the ratio rule against strength",
        lines,
        [strength(result) for result in curve_with_ends(part, RATIO, "pgd")],
    )
    return Section("Fixed strength under three attacks", prose, pictures=[chart])


def curve_with_ends(part: RunView, model: str, metric: str) -> list[Result]:
    """A curve over γ, with the base models as its ends where they were measured under the same
    attack."""
    curve = part.curve(model, metric)
    _, at_zero, at_infinity, _, _ = ATTACKS[metric]
    first, last = part.find("accurate", at_zero), part.find("robust", at_infinity)
    if curve and first is not None:
        curve.insert(0, replace(first, alpha=0.0))
    if curve and last is not None:
        curve.append(replace(last, alpha=1.0))
    return curve


def neighbours(run: RunView) -> Section | None:
    """Accuracy with K nearest neighbours as the oracle, against γ [Bai2022, Figures 5 and 9]."""
    if (part := run.subrun("neighbours", STUDY)) is None:
        return None
    prose = [
        "The oracle is a vote of the K nearest training images, mixed into the accurate model with strength γ: "
        "the accurate model at 0, the vote alone at ∞. Bands are exact 95 % intervals over n = "
        f"{part.summary.results[0].n} images.",
        "Attacked accuracy is the worst case over attacks on the mixture (a plain vote has no gradient), on the "
        "mixture with softplus in the backward pass, and on the accurate model. No attack targets the selection "
        "of neighbours. The right ends show how far attacks on the network transfer, not how robust a vote is.",
        *_ties(part),
    ]
    models = sorted(
        part.swept_models(), key=lambda model: (int(model.split()[0]), "plain" not in model)
    )
    sizes = list(dict.fromkeys(model.split()[0] for model in models))
    colors = dict(zip(sizes, ("accurate", "mixed", "robust", *OTHERS) * len(sizes), strict=False))
    panels = []
    for metric, title in ((CLEAN, "clean"), (WORST, "attacked")):
        base = part.find("accurate", metric)
        start = [] if base is None else [replace(base, alpha=0.0)]
        lines = [
            strength_line(
                start + part.curve(model, metric),
                colors[model.split()[0]],
                f"K = {model.split()[0]}" + ("" if "plain" in model else ", weighted"),
                linestyle="-" if "plain" in model else "--",
            )
            for model in models
        ]
        strengths = [0.0, *(strength(result) for result in part.curve(models[0], metric))]
        panels.append(Panel(lines, title=title, x_ticks=strength_ticks(strengths, most=3)))
    chart = Chart(
        "neighbours",
        "Clean and attacked accuracy against strength for several K",
        panels,
        x_label="strength γ",
        y_label=CORRECT,
        side_by_side=True,
    )
    return Section(
        "Nearest neighbours as the oracle", prose, [_numbers(part, (CLEAN, WORST))], [chart]
    )


def _ties(part: RunView) -> list[str]:
    """How much the accurate model adds to plain votes by breaking their ties."""
    gaps = []
    for model in part.swept_models():
        curve = part.curve(model, CLEAN)
        if len(curve) > 1 and curve[-1].alpha == 1 and "plain" in model:
            gaps.append((curve[-2].value - curve[-1].value, model))
    if not gaps or max(gaps)[0] <= 0:
        return []
    gap, model = max(gaps)
    return [
        f"Plain votes can tie, and at any finite γ the accurate model breaks the tie. With {model}, the largest "
        f"finite γ is {format.number(100 * gap, 1)} points above the vote alone on clean images."
    ]


def _numbers(part: RunView, metrics: Sequence[str]) -> Table:
    models = part.swept_models()
    results = sorted(
        (result for model in models for metric in metrics for result in part.curve(model, metric)),
        key=lambda result: (models.index(result.model), result.alpha),
    )
    return result_table(
        SAME_NUMBERS,
        "rule",
        results,
        columns=metrics,
        collapsed=True,
        row=lambda result: f"{result.model}, γ = {strength(result):.4g}",
    )
