"""Locally biased smoothing with a learned policy: crossing, attacks on the policy, AutoAttack,
gradient norms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import Array, GradientArrays
from equipoise.reporting.charts import (
    CORRECT,
    WIDTH,
    Chart,
    Line,
    Palette,
    Panel,
    Picture,
    ReferenceLine,
)
from equipoise.reporting.local_smoothing import (
    STUDY,
    positions,
    strength,
    strength_chart,
    strength_line,
)
from equipoise.reporting.section import INTERVALS, RunView, Section, result_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = {
    "clean": "clean",
    "attacked_accurate": "attack on the accurate model",
    "attacked_robust": "attack on the robust model",
}
COLORS = {"accurate": "accurate", "robust": "robust", "adaptive": "mixed"}
TARGET_STRENGTH = "strength γ of the attacked rule"


def crossing(run: RunView) -> Section | None:
    """Accuracy of g and h under attacks on the rule with strength γ_t, and where they cross
    [Bai2022, Figure 4]."""
    part, summary = run.subrun("crossing", STUDY), run.summary.crossing
    if part is None or summary is None:
        return None
    where = (
        f"Their accuracies cross at γ₀ = {summary.gamma:.3g} (95 % of resampled image sets: {summary.low:.3g} to "
        f"{summary.high:.3g})."
        if summary.met
        else f"Their accuracies do not cross at these strengths; γ₀ = {summary.gamma:.3g} is one step beyond the last "
        "strength."
    )
    prose = [
        "Attacks on the rule with a small strength break the accurate model, attacks with a large strength the "
        f"robust model. {where} The policy is trained to trust the robust model under attacks below γ₀ and the "
        f"accurate model above. Measured on n = {part.summary.results[0].n} held-out images that neither base "
        "model was trained on."
    ]
    curves = {model: part.curve(model, WORST) for model in ("accurate", "robust")}
    strengths = [strength(result) for result in curves["accurate"]]
    ends = positions(strengths).values()
    low, at, high = (
        min(max(math.log10(value), min(ends)), max(ends)) if value > 0 else min(ends)
        for value in (summary.low, summary.gamma, summary.high)
    )
    lines = [
        strength_line(curve, COLORS[model], f"{model} model") for model, curve in curves.items()
    ]
    chart = strength_chart(
        "crossing",
        "Accuracy of both base models against the strength of the attacked rule",
        lines,
        strengths,
        x_label=TARGET_STRENGTH,
        references=[ReferenceLine(x=at, text=f"γ₀ = {summary.gamma:.3g}", interval=(low, high))],
    )
    return Section("Crossing of the base models", prose, pictures=[chart])


def targets(run: RunView) -> Section | None:
    """The adaptive classifier under attacks on rules with a fixed γ_t [Bai2022, Figure 7]."""
    if (part := run.subrun("targets", STUDY)) is None:
        return None
    curves = {model: part.curve(model, WORST) for model in COLORS}
    lowest = min(curves["adaptive"], key=lambda result: result.value)
    attacks = [
        result.value
        for attack in run.attacks
        if (result := run.find("adaptive", attack)) is not None
    ]
    prose = [
        "The adaptive classifier selects the strength for every image by a policy. An attacker may differentiate "
        "through the policy, or ignore it and attack a rule with a fixed strength. The fixed strength that leaves "
        f"the lowest accuracy is γ = {strength(lowest):.3g}: {format.estimate(lowest)}."
    ]
    if attacks:
        through = min(attacks)
        prose[0] += (
            " This attack is stronger than every attack through the policy."
            if lowest.value < through
            else f" Attacks through the policy are {'stronger' if through < lowest.value else 'equally strong'} "
            f"({format.percent(through)})."
        )
    lines = [
        strength_line(curve, COLORS[model], model, linestyle="-" if model == "adaptive" else "--")
        for model, curve in curves.items()
    ]
    levels = {
        "clean": run.find("adaptive", CLEAN),
        "through the policy": run.find("adaptive", WORST),
    }
    references = [
        ReferenceLine(y=100 * result.value, text=f"adaptive, {name}")
        for name, result in levels.items()
        if result
    ]
    chart = strength_chart(
        "targets",
        "Accuracy of the adaptive classifier against the strength of the attacked rule",
        lines,
        [strength(result) for result in curves["adaptive"]],
        x_label=TARGET_STRENGTH,
        references=references,
    )
    return Section("The policy under attacks of fixed strength", prose, pictures=[chart])


def policy_losses(run: RunView) -> Section | None:
    """Policies by the loss that trained them [Bai2022, Section 5.3]."""
    if (part := run.subrun("losses", STUDY)) is None:
        return None
    prose = [
        "Three policies that were trained equally long on the same images, each by another loss: the composite "
        "one of the paper, and the two that it combines, the cross-entropy of the adaptive classifier and a hinge "
        "on its strength towards the model that the attack does not break. Attacks are PGD on either model alone "
        "and through the policy."
    ]
    table = result_table(
        INTERVALS,
        "trained by",
        part.summary.results,
        columns=(CLEAN, "pgd-std", "pgd-rob", "pgd", WORST),
    )
    return Section("Losses of the policy", prose, [table])


def theorems(run: RunView) -> Section | None:
    """Radii of Theorems 1 and 2 [Bai2022]: estimates."""
    if (part := run.subrun("theorems", STUDY)) is None:
        return None
    prose = [
        "These are estimates, not certificates: the constants of both theorems are suprema over a ball, and a "
        "search finds at most as much. Theorem 1 is for plain votes of neighbours, Theorem 2 for the ratio of the "
        "gradients of two networks. A radius is the largest of a few that the theorem allows; positive is the "
        "share of images for which it allows any of them."
    ]
    table = result_table(
        "Mean radius, in [0, 1] pixels, and share of images with a positive one, with 95 % intervals",
        "rule",
        part.summary.results,
        row=lambda result: result.model,
        columns=("radius", "positive"),
    )
    return Section("Radii of the theorems (estimates)", prose, [table])


def radii(run: RunView) -> Section | None:
    """Attacks of other radii than the policy was trained for [Bai2022, Figure 8]."""
    if (part := run.subrun("radii", STUDY)) is None:
        return None
    prose = [
        "The policy was trained for one radius. Here it is attacked at others by PGD through the policy, on n = "
        f"{part.summary.results[0].n} images."
    ]
    lines = []
    for model in ("robust", "adaptive"):
        points = sorted(
            (
                (float(result.metric.split()[1]), result)
                for result in part.summary.results
                if result.model == model and result.metric.startswith("eps ")
            ),
            key=lambda point: point[0],
        )
        lines.append(
            Line.of(
                [eps for eps, _ in points], [result for _, result in points], COLORS[model], model
            )
        )
    chart = Chart(
        "radii",
        "Accuracy against the radius of the attack",
        [Panel(lines)],
        x_label="radius of the attack, in [0, 1] pixels",
        y_label=CORRECT,
    )
    return Section("Attacks of other radii", prose, pictures=[chart])


def autoattack(run: RunView) -> Section | None:
    """AutoAttack on the adaptive classifier; near the top, because it is stronger than the attacks
    of the headline."""
    if (part := run.subrun("auto", STUDY)) is None:
        return None
    prose = [
        "The results above are under PGD. AutoAttack is stronger; it was run on fewer images, and not at all in "
        "the paper that proposed the policy."
    ]
    adaptive, robust = part.find("adaptive", "auto"), part.find("robust", "auto")
    if adaptive is not None and robust is not None:
        prose.insert(
            0,
            f"Under AutoAttack, the adaptive classifier reaches {format.estimate(adaptive)}, the robust "
            f"model {format.estimate(robust)}.",
        )
    results = [
        result
        for model in COLORS
        for metric in (CLEAN, "auto")
        if (result := part.find(model, metric)) is not None
    ]
    return Section(
        "AutoAttack through the policy",
        prose,
        [result_table(INTERVALS, "model", results, columns=(CLEAN, "auto"))],
    )


def gradients(run: RunView) -> Section | None:
    """Distributions and correlations of ‖∇g_i‖ and ‖∇h_i‖ [Bai2022, Figures 2, 3 and 10]."""
    if (arrays := GradientArrays.load(run.folder)) is None:
        return None
    g, h = arrays.clean_of_accurate, arrays.clean_of_robust
    prose = [
        f"The accurate model has the larger gradient for {format.percent(float((g > h).mean()))} of all images "
        f"and classes. The mean correlation between two classes is {_mean_correlation(g, g):.2f} within the "
        f"accurate model, {_mean_correlation(h, h):.2f} within the robust model and {_mean_correlation(g, h):.2f} "
        f"between the two. Gradients are measured in the dual norm of the attack's, on {len(g)} images."
    ]
    panels = []
    for model in GradientArrays.MODELS:
        lines = []
        for (images, label), linestyle in zip(INPUTS.items(), ("-", "--", ":"), strict=True):
            norms = np.maximum(arrays.norms(images, model), 1e-12)
            counts, edges = np.histogram(np.log10(norms).ravel(), bins=40, density=True)
            lines.append(
                Line(
                    x=((edges[1:] + edges[:-1]) / 2).tolist(),
                    y=counts.tolist(),
                    color=model,
                    label=label,
                    linestyle=linestyle,
                    marker="",
                    width=1.4,
                )
            )
        panels.append(Panel(lines, title=f"{model} model", title_color=model))
    return Section(
        "Gradient norms of both models",
        prose,
        pictures=[
            Chart(
                "gradient-norms",
                "Distributions of the gradient norms of both models",
                panels,
                y_label="density",
                x_label="log₁₀ of the gradient norm of a class",
                side_by_side=True,
            ),
            Picture(
                "gradient-correlations",
                "Correlations of gradient norms, clean and attacked",
                lambda palette: draw_correlations(palette, arrays),
            ),
        ],
    )


def _mean_correlation(a: Array, b: Array) -> float:
    """Mean correlation between the columns of two arrays, without that of a column with itself."""
    between = correlations(a, b)[: a.shape[1], a.shape[1] :]
    return float((between[~np.eye(len(between), dtype=bool)] if a is b else between).mean())


def correlations(a: Array, b: Array) -> Array:
    """Correlations between all columns of two arrays; a constant column has correlation zero."""
    both = np.concatenate([a, b], axis=1).astype(np.float64)
    centred = both - both.mean(axis=0)
    spread = np.sqrt((centred**2).sum(axis=0))
    spread[spread == 0] = 1
    matrix: Array = (centred.T @ centred) / np.outer(spread, spread)
    return matrix


def draw_correlations(palette: Palette, arrays: GradientArrays) -> Figure:
    """A matrix per set of images: classes of the accurate model, then of the robust model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 2.4))
    panels = figure.subplots(1, len(INPUTS))
    classes = arrays.clean_of_accurate.shape[1]
    centres, names = [classes / 2 - 0.5, 1.5 * classes - 0.5], ["accurate", "robust"]
    for axes, (images, title) in zip(panels, INPUTS.items(), strict=True):
        matrix = correlations(arrays.norms(images, "accurate"), arrays.norms(images, "robust"))
        image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none")
        axes.set_xticks(centres, names)
        axes.set_yticks(centres, names if images == "clean" else ["", ""], rotation=90, va="center")
        axes.set_title(title.replace("attack on the ", "attacked: "), fontsize=8)
        axes.grid(visible=False)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=panels, shrink=0.8)
    return figure
