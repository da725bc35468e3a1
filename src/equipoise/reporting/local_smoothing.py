"""Local smoothing with fixed strengths: neighbours as the oracle, the trust terms, and who attacks whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from equipoise.reporting import numbers, style
from equipoise.reporting.local_curves import alone, curve, gamma_of, names, part, plot, strength_axis, with_ends
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST = "constant, probabilities"


def neighbours(view: RunView) -> Section | None:
    """Accuracy with K nearest neighbours as the oracle, against γ [Bai2022, Figures 5 and 9]."""
    found = part(view, "neighbours")
    if found is None:
        return None
    n = found.results[0]["n"]
    prose = ["The oracle is a vote of the K nearest training images, mixed into the accurate model with the strength "
             f"γ; at 0 it is the accurate model, at ∞ the vote alone. n = {n} images, bands are exact 95 % intervals. "
             "Attacked: the worst, image by image, of attacks through the mixture (a plain vote passes no gradient "
             "on), of the same with softplus in the backward pass on what stands, and of one on the accurate model. "
             "None aims at the choice of neighbours, so the right ends say how far attacks on the network carry over, "
             "not how robust a vote is."]
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

    figure = Figure(figsize=(style.WIDTH, 3.4))
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
        strength_axis(axes, gammas, most=3)
        axes.set_title({"clean": "clean", "worst": "attacked"}[metric], loc="left")
    panels[0].set_ylabel("answered rightly, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, labelcolor=palette.ink, handlelength=2.6)
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
             "through it with softplus in the backward pass where an image still stands (the gradient of a "
             "ReLU network's steepness is zero), on the accurate and on the robust model."]
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
                    past = ", past its accurate end" if c["value"] > line[-1][0] else ""
                    above.append((excess, clear, f"{model} at γ = {gamma_of(c['alpha']):.3g}{past}"))
    if not above:
        return "Constant trust over probabilities is the upper envelope: no other rule has a point above its line."
    clear = [text for _, sure, text in above if sure]
    most = max(above)
    some = (f"of other rules 1 point lies above its line, by {numbers.points(most[0])} points" if len(above) == 1 else
            f"of other rules {len(above)} points lie above its line, at most by {numbers.points(most[0])} points")
    told = f"Constant trust over probabilities is not the upper envelope everywhere: {some} ({most[2]}). "
    return told + ("None by more than the half-width of its interval." if not clear else
                   f"By more than the half-width of their intervals: {', '.join(clear)}.")


def _height(line: Sequence[tuple[float, float]], clean: float) -> float:
    """The greatest attacked accuracy that the line has at this clean accuracy or a higher one; past its end 0."""
    best = max((attacked for own, attacked in line if own >= clean), default=0.0)
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
            # Lines leave the accurate end to the left and the robust one to the right.
            axes.annotate(side, (100 * ends[0]["value"], 100 * ends[1]["value"]), xytext=(0, 8), ha="center",
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
    prose = ["The rule of the first paper: logits, trusted by the ratio of gradients; at 0 it is the accurate model, "
             "at ∞ the robust one. Attacks on the accurate model hurt it at small strengths, attacks on the robust one "
             "at large strengths; the attack through the rule itself should lie below both wherever it is not masked."]
    looks = {"clean": "-", "pgd-std": ":", "pgd-rob": "-.", "pgd": "--", "pgd-soft": (0, (1, 1))}
    told = {"clean": "clean", "pgd-std": "attack on the accurate model", "pgd-rob": "attack on the robust model",
            "pgd": "attack through the rule", "pgd-soft": "the same, then softened"}

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.2))
        axes = figure.subplots()
        colours = {"clean": palette.mixed, "pgd-std": palette.accurate, "pgd-rob": palette.robust, "pgd": palette.ink,
                   "pgd-soft": palette.muted}
        for metric, line in looks.items():
            if rows := with_ends(found, model, metric):
                plot(axes, rows, color=colours[metric], linestyle=line, label=told[metric])
        strength_axis(axes, [gamma_of(row["alpha"]) for row in with_ends(found, model, "pgd")])
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
