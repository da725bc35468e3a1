"""Local smoothing with fixed strengths: neighbours as the oracle, the trust terms, and who attacks whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from equipoise.records import Row
from equipoise.report import numbers, style
from equipoise.report.section import Cell, Picture, Section, Table
from equipoise.report.style import Palette
from equipoise.report.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = "local-smoothing"
Curve = list[Row]  # results of one model and metric in order of alpha
BEST = "constant, probabilities"


def part(view: RunView, name: str) -> RunView | None:
    """A part of this study, if it has been done."""
    return view.sub(name) if view.identity.get("study") == STUDY else None


def curve(view: RunView, model: str, metric: str) -> Curve:
    """Results of a model at every strength."""
    return sorted((row for row in view.results if row["model"] == model and row["metric"] == metric and "alpha" in row),
                  key=lambda row: row["alpha"])


def names(view: RunView) -> list[str]:
    """Models that were measured at several strengths, in the order of the summary."""
    return list(dict.fromkeys(row["model"] for row in view.results if "alpha" in row))


def alone(view: RunView, model: str, metric: str) -> Row | None:
    """The result of a model without a strength."""
    return next((row for row in view.results if (row["model"], row["metric"]) == (model, metric)
                 and "alpha" not in row), None)


def gamma_of(alpha: float) -> float:
    """The strength γ whose weight γ/(1 + γ) a row carries."""
    return math.inf if alpha >= 1 else alpha / (1 - alpha)


def place(gammas: Sequence[float]) -> dict[float, float]:
    """γ → where it stands on an axis of log₁₀ γ; 0 and ∞ stand one step beyond their neighbours."""
    logs = {gamma: math.log10(gamma) for gamma in gammas if 0 < gamma < math.inf}
    ends = {0.0: min(logs.values()) - 1, math.inf: max(logs.values()) + 1}
    return {gamma: logs[gamma] if gamma in logs else ends[gamma] for gamma in gammas}


def strength_axis(axes: Axes, gammas: Sequence[float], label: str = "strength γ") -> None:
    """Ticks at whole powers of ten, and at 0 and ∞ where they occur."""
    where = place(gammas)
    inner = [x for gamma, x in where.items() if 0 < gamma < math.inf]
    step = max(1, math.ceil((max(inner) - min(inner)) / 5))
    first, last = math.ceil(min(inner) - 0.01), math.floor(max(inner) + 0.01)
    ticks = {float(x): f"{10.0**x:g}" for x in range(first, last + 1, step)}
    ticks |= {where[gamma]: text for gamma, text in ((0.0, "0"), (math.inf, "∞")) if gamma in where}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel(label)


def plot(axes: Axes, rows: Curve, **look: Any) -> None:
    """Accuracy in percent with its interval against the strength."""
    gammas = [gamma_of(row["alpha"]) for row in rows]
    where = place(gammas)
    x = [where[gamma] for gamma in gammas]
    axes.plot(x, [100 * row["value"] for row in rows], marker="o", **look)
    axes.fill_between(x, [100 * row["low"] for row in rows], [100 * row["high"] for row in rows],
                      color=look.get("color"), alpha=0.10, linewidth=0)


def neighbours(view: RunView) -> Section | None:
    """Accuracy with K nearest neighbours as the oracle, against γ [Bai2022, Figures 5 and 9]."""
    found = part(view, "neighbours")
    if found is None:
        return None
    n = found.results[0]["n"]
    prose = ["The oracle is a vote of the K nearest training images, mixed into the accurate model with the strength "
             f"γ; at 0 it is the accurate model, at ∞ the vote alone. n = {n} images, bands are exact 95 % intervals. "
             "Attacked: the worse, image by image, of an attack through the mixture (through which a plain vote "
             "passes no gradient) and one on the accurate model. Neither aims at the choice of neighbours, so the "
             "right ends say how far attacks on the network carry over, not how robust a vote is."]
    tie = _ties(found)
    picture = Picture("neighbours", "Clean and attacked accuracy against strength for several K",
                      lambda palette: _draw_neighbours(palette, found))
    return Section("Neighbours as the oracle", prose + tie, [_numbers(found, ("clean", "worst"))], [picture])


def _ties(found: RunView) -> list[str]:
    """What is left of g at a large strength: it breaks the ties of plain votes."""
    gaps = []
    for model in names(found):
        rows = curve(found, model, "clean")
        if len(rows) > 1 and rows[-1]["alpha"] == 1 and "plain" in model:
            gaps.append((rows[-2]["value"] - rows[-1]["value"], model))
    if not gaps or max(gaps)[0] <= 0:
        return []
    gap, model = max(gaps)
    return [f"Plain votes can tie, and any finite γ lets the accurate model decide then: with {model} the largest "
            f"finite γ is {numbers.points(gap)} points above the vote alone on clean images."]


def _draw_neighbours(palette: Palette, found: RunView) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.0))
    panels = figure.subplots(1, 2, sharey=True)
    colours = [palette.accurate, palette.mixed, palette.robust, *palette.others]
    shown = sorted(names(found), key=lambda model: (int(model.split()[0]), "plain" not in model))
    sizes = list(dict.fromkeys(model.split()[0] for model in shown))
    for axes, metric in zip(panels, ("clean", "worst"), strict=True):
        base = alone(found, "accurate", metric)
        for model in shown:
            colour = colours[sizes.index(model.split()[0]) % len(colours)]
            rows = curve(found, model, metric)
            start = [] if base is None else [{**base, "alpha": 0.0}]
            plot(axes, start + rows, color=colour, linestyle="-" if "plain" in model else "--",
                 label=f"K = {model.split()[0]}" + ("" if "plain" in model else ", weighted"))
        gammas = [0.0, *(gamma_of(row["alpha"]) for row in curve(found, names(found)[0], metric))]
        strength_axis(axes, gammas)
        axes.set_title({"clean": "clean", "worst": "attacked"}[metric], loc="left")
    panels[0].set_ylabel("answered rightly, %")
    panels[1].legend(loc="lower right", labelcolor=palette.ink)
    return figure


def trust(view: RunView) -> Section | None:
    """Clean against attacked accuracy for every trust term [Bai2024, Figure 1]."""
    found = part(view, "trust")
    if found is None:
        return None
    n = found.results[0]["n"]
    prose = [envelope(found),
             "Every point is one strength of one rule: the trust term R is constant, the gradient of each class, that "
             "of the greatest class, or the ratio of the two models' gradients; solid lines mix probabilities, dashed "
             f"ones logits. n = {n} images. Attacked is the worst case, image by image, over attacks through the rule, "
             "through the rule with softplus in the backward pass (the gradient of a ReLU network's steepness is "
             "zero), on the accurate and on the robust model."]
    picture = Picture("trust", "Attacked against clean accuracy for four trust terms over logits and probabilities",
                      lambda palette: _draw_trust(palette, found))
    metrics = ("clean", "pgd", "pgd-soft", "pgd-std", "pgd-rob", "worst")
    return Section("Trust terms", prose, [_numbers(found, metrics)], [picture])


def envelope(found: RunView) -> str:
    """Whether constant trust over probabilities is the upper envelope, and where it is not."""
    ends = [(alone(found, side, "clean"), alone(found, side, "worst")) for side in ("accurate", "robust")]
    own = [(row["value"], worst["value"])
           for row, worst in zip(curve(found, BEST, "clean"), curve(found, BEST, "worst"), strict=True)]
    line = sorted([*own, *((c["value"], w["value"]) for c, w in ends if c is not None and w is not None)])
    above = []
    for model in names(found):
        if model != BEST:
            for c, w in zip(curve(found, model, "clean"), curve(found, model, "worst"), strict=True):
                excess = w["value"] - _height(line, c["value"])
                if excess > 0:
                    clear = excess > (w["high"] - w["low"]) / 2
                    above.append((excess, clear, f"{model} at γ = {gamma_of(c['alpha']):.3g}"))
    if not above:
        return "Constant trust over probabilities is the upper envelope: no other rule has a point above its line."
    clear = [text for _, sure, text in above if sure]
    most = max(above)
    told = (f"Constant trust over probabilities is not the upper envelope everywhere: {len(above)} points of other "
            f"rules lie above its line, at most by {numbers.points(most[0])} points ({most[2]}). ")
    return told + ("None of them by more than the half-width of its interval." if not clear else
                   f"By more than the half-width of their intervals: {', '.join(clear)}.")


def _height(line: Sequence[tuple[float, float]], clean: float) -> float:
    """The greatest attacked accuracy that the line has at this clean accuracy or a higher one."""
    best = max((attacked for own, attacked in line if own >= clean), default=-1.0)
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= clean <= x1 and x1 > x0:
            best = max(best, y0 + (y1 - y0) * (clean - x0) / (x1 - x0))
    return best


def _draw_trust(palette: Palette, found: RunView) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 4.0))
    axes = figure.subplots()
    terms = list(dict.fromkeys(model.split(",")[0] for model in names(found)))
    colours = dict(zip(terms, (palette.mixed, *palette.others, palette.wrong), strict=False))
    for model in names(found):
        term, _, space = model.partition(", ")
        clean, worst = curve(found, model, "clean"), curve(found, model, "worst")
        axes.plot([100 * row["value"] for row in clean], [100 * row["value"] for row in worst], marker="o",
                  color=colours[term], linestyle="-" if space == "probabilities" else "--", label=model)
    for side, colour in (("accurate", palette.accurate), ("robust", palette.robust)):
        ends = [alone(found, side, metric) for metric in ("clean", "worst")]
        if ends[0] is not None and ends[1] is not None:
            axes.plot(100 * ends[0]["value"], 100 * ends[1]["value"], "s", color=colour, markersize=7)
            axes.annotate(side, (100 * ends[0]["value"], 100 * ends[1]["value"]), xytext=(6, -3),
                          textcoords="offset points", color=colour, fontsize=8)
    axes.set(xlabel="clean, answered rightly, %", ylabel="attacked, answered rightly, %")
    axes.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=2, labelcolor=palette.ink, handlelength=2.6)
    return figure


def fixed(view: RunView) -> Section | None:
    """The ratio rule under attacks on g, on h and on itself, against γ [Bai2022, Figure 6]."""
    found, model = part(view, "trust"), "ratio, logits"
    if found is None or not curve(found, model, "pgd"):
        return None
    prose = ["The rule of the first paper: logits, trusted by the ratio of gradients. Attacks on the accurate model "
             "hurt it at small strengths, attacks on the robust one at large strengths; the attack through the rule "
             "itself should lie below both wherever it is not masked."]
    looks = {"clean": "-", "pgd-std": ":", "pgd-rob": "-.", "pgd": "--", "pgd-soft": (0, (1, 1))}
    told = {"clean": "clean", "pgd-std": "attack on the accurate model", "pgd-rob": "attack on the robust model",
            "pgd": "attack through the rule", "pgd-soft": "the same, softened"}

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.2))
        axes = figure.subplots()
        colours = {"clean": palette.mixed, "pgd-std": palette.accurate, "pgd-rob": palette.robust, "pgd": palette.ink,
                   "pgd-soft": palette.muted}
        for metric, line in looks.items():
            if rows := curve(found, model, metric):
                plot(axes, rows, color=colours[metric], linestyle=line, label=told[metric])
        strength_axis(axes, [gamma_of(row["alpha"]) for row in curve(found, model, "pgd")])
        axes.set_ylabel("answered rightly, %")
        figure.legend(loc="outside lower center", ncols=2, labelcolor=palette.ink)
        return figure

    return Section("A fixed strength under three attacks", prose,
                   pictures=[Picture("fixed-strength", "Accuracy of the ratio rule against strength", draw)])


def _numbers(found: RunView, metrics: Sequence[str]) -> Table:
    shown = [metric for metric in metrics if any(row["metric"] == metric for row in found.results)]
    body = []
    for model in names(found):
        at = {(row["metric"], row["alpha"]): row for row in found.results if row["model"] == model}
        for alpha in sorted({alpha for _, alpha in at}):
            cells = [Cell(numbers.estimate(at[metric, alpha])) if (metric, alpha) in at else Cell("–")
                     for metric in shown]
            body.append([Cell(f"{model}, γ = {gamma_of(alpha):.4g}"), *cells])
    return Table("The same numbers as a table.", ["rule", *shown], body, folded=True)
