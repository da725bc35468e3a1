"""The crossing of two bases under aimed attacks, the policy that learns from it, and gradients of both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equipoise.reporting import numbers, style
from equipoise.reporting.local_curves import alone, curve, gamma_of, part, place, plot, strength_axis
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"clean": "clean", "attacked_accurate": "attacked at the accurate model",
         "attacked_robust": "attacked at the robust model"}


def crossing(view: RunView) -> Section | None:
    """Accuracy of g and h under attacks that aim at γ_t, with the crossing [Bai2022, Figure 4]."""
    found, told = part(view, "crossing"), view.summary.get("crossing")
    if found is None or not isinstance(told, dict):
        return None
    n = found.results[0]["n"]
    if told["met"]:
        where = (f"They cross at γ₀ = {told['gamma']:.3g} (95 % of resampled image sets: {told['low']:.3g} to "
                 f"{told['high']:.3g}).")
    else:
        where = (f"They do not cross between these targets; γ₀ = {told['gamma']:.3g} stands one step beyond the last "
                 "that one of them wins.")
    prose = ["An attack that aims at a small strength breaks the accurate model, one at a large strength the robust "
             f"one. {where} The policy is taught to trust the robust model against attacks below γ₀ and the accurate "
             f"one above. n = {n} held-out images that neither base has learnt from."]

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.2))
        axes = figure.subplots()
        for model, colour in (("accurate", palette.accurate), ("robust", palette.robust)):
            plot(axes, curve(found, model, "aimed"), color=colour, label=f"{model} model")
        gammas = [gamma_of(row["alpha"]) for row in curve(found, "accurate", "aimed")]
        _mark(axes, gammas, told, palette)
        strength_axis(axes, gammas, "strength γ at which the attack aims")
        axes.set_ylabel("answered rightly, %")
        axes.legend(loc="lower right", labelcolor=palette.ink)
        return figure

    return Section("Where the bases change places", prose,
                   pictures=[Picture("crossing", "Accuracy of both bases against the aim of the attack", draw)])


def _mark(axes: Any, gammas: list[float], told: dict[str, Any], palette: Palette) -> None:
    ends = place(gammas)
    low, at, high = (min(max(np.log10(told[key]), min(ends.values())), max(ends.values()))
                     for key in ("low", "gamma", "high"))
    axes.axvspan(low, high, color=palette.muted, alpha=0.10, linewidth=0)
    axes.axvline(at, color=palette.muted, linewidth=1.0, linestyle=(0, (1, 2)))
    axes.annotate(f"γ₀ = {told['gamma']:.3g}", (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
                  textcoords="offset points", color=palette.muted, fontsize=8)


def targets(view: RunView) -> Section | None:
    """The adaptive classifier under attacks at fixed γ_t [Bai2022, Figure 7]."""
    found = part(view, "targets")
    if found is None:
        return None
    rows = curve(found, "adaptive", "aimed")
    worst = min(rows, key=lambda row: row["value"])
    own = [(metric, alone(view, "adaptive", metric)) for metric in ("clean", *view.attacks)]
    lines = {metric: row for metric, row in own if row is not None}
    through = min((row["value"] for metric, row in lines.items() if metric != "clean"), default=None)
    shown = {"clean": lines.get("clean"), "through the policy": alone(view, "adaptive", "worst")}
    said = f"The strongest aim is γ = {gamma_of(worst['alpha']):.3g}: {numbers.estimate(worst)}. "
    if through is not None:
        said += ("It is stronger than every attack through the policy." if worst["value"] < through else
                 "An attack through the policy itself is "
                 f"{'stronger' if through < worst['value'] else 'as strong'} ({numbers.percent(through)}).")
    prose = ["The adaptive classifier chooses the strength of every image by a policy; an attacker may pass through "
             f"the policy, or ignore it and aim at a fixed strength. {said}"]

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.2))
        axes = figure.subplots()
        for model, colour in (("accurate", palette.accurate), ("robust", palette.robust), ("adaptive", palette.mixed)):
            line = "-" if model == "adaptive" else "--"
            plot(axes, curve(found, model, "aimed"), color=colour, label=model, linestyle=line)
        for metric, row in shown.items():
            if row is None:
                continue
            axes.axhline(100 * row["value"], color=palette.muted, linewidth=0.9, linestyle=(0, (1, 2)))
            axes.annotate(f"adaptive, {metric}", (0, 100 * row["value"]), xycoords=("axes fraction", "data"),
                          xytext=(2, 2), textcoords="offset points", color=palette.muted, fontsize=7)
        strength_axis(axes, [gamma_of(row["alpha"]) for row in rows], "strength γ at which the attack aims")
        axes.set_ylabel("answered rightly, %")
        axes.legend(loc="lower right", labelcolor=palette.ink)
        return figure

    return Section("The policy under aimed attacks", prose,
                   pictures=[Picture("targets", "Accuracy of the adaptive classifier against the aim", draw)])


def radii(view: RunView) -> Section | None:
    """Other radii than the policy was trained for [Bai2022, Figure 8]."""
    found = part(view, "radii")
    if found is None:
        return None
    prose = ["The policy was trained at one radius; here it meets others under PGD through the policy, on n = "
             f"{found.results[0]['n']} images."]
    return Section("Other radii", prose, pictures=[Picture("radii", "Accuracy against the radius of the attack",
                                                           lambda palette: _draw_radii(palette, found))])


def auto(view: RunView) -> Section | None:
    """AutoAttack where it was run: near the top, because a long list says more than the attacks there."""
    found = part(view, "auto")
    if found is None:
        return None
    adaptive, robust = alone(found, "adaptive", "auto"), alone(found, "robust", "auto")
    prose = ["The numbers above are under PGD. AutoAttack, which the paper that proposed the policy did not run, is "
             "stronger; here it meets fewer images."]
    if adaptive is not None and robust is not None:
        prose.append(f"Of the adaptive classifier it leaves {numbers.estimate(adaptive)}, of the robust model "
                     f"{numbers.estimate(robust)}.")
    metrics = ("clean", "auto")
    body = [[Cell(model), *(Cell(numbers.estimate(row)) if (row := alone(found, model, metric)) else Cell("–")
                            for metric in metrics)] for model in ("accurate", "robust", "adaptive")]
    return Section("AutoAttack through the policy", prose,
                   [Table("Images answered rightly, with exact 95 % intervals.", ["model", *metrics], body)])


def _draw_radii(palette: Palette, found: RunView) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.0))
    axes = figure.subplots()
    for model, colour in (("robust", palette.robust), ("adaptive", palette.mixed)):
        rows = sorted((float(row["metric"].split()[1]), row) for row in found.results
                      if row["model"] == model and row["metric"].startswith("eps "))
        x = [eps for eps, _ in rows]
        axes.plot(x, [100 * row["value"] for _, row in rows], marker="o", color=colour, label=model)
        low, high = ([100 * row[key] for _, row in rows] for key in ("low", "high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="radius of the attack, in [0, 1] pixels", ylabel="answered rightly, %")
    axes.legend(labelcolor=palette.ink)
    return figure


def gradients(view: RunView) -> Section | None:
    """Distributions and correlations of ‖∇g_i‖ and ‖∇h_i‖ [Bai2022, Figures 2, 3 and 10]."""
    names = [f"gradient_{kind}_of_{side}" for kind in KINDS for side in ("accurate", "robust")]
    if any(name not in view.arrays for name in names):
        return None
    held = {name: view.arrays[name] for name in names}
    g, h = held["gradient_clean_of_accurate"], held["gradient_clean_of_robust"]
    steeper = float((g > h).mean())
    prose = [f"How steep each class is, in the norm dual to the attack's, on {len(g)} images. The accurate model is "
             f"the steeper one in {numbers.percent(steeper)} of all images and classes. The sizes of two classes "
             f"correlate by {_mean(g, g):.2f} on average within the accurate model, by {_mean(h, h):.2f} within the "
             f"robust one, and by {_mean(g, h):.2f} between the two."]
    pictures = [Picture("gradient-sizes", "Distributions of gradient sizes of both models",
                        lambda palette: _draw_sizes(palette, held)),
                Picture("gradient-correlations", "Correlations of gradient sizes, clean and attacked",
                        lambda palette: _draw_correlations(palette, held))]
    return Section("Gradients of both sides", prose, pictures=pictures)


def _mean(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Mean correlation between the columns of two arrays; a column is not compared with itself."""
    whole = _correlations(a, b)[: a.shape[1], a.shape[1] :]
    kept = whole[~np.eye(len(whole), dtype=bool)] if a is b else whole
    return float(kept.mean())


def _correlations(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    both = np.concatenate([a, b], axis=1).astype(np.float64)
    centred = both - both.mean(axis=0)
    spread = np.sqrt((centred**2).sum(axis=0))
    spread[spread == 0] = 1  # a class whose gradient never changes is correlated with nothing
    found: NDArray[Any] = (centred.T @ centred) / np.outer(spread, spread)
    return found


def _draw_sizes(palette: Palette, held: dict[str, NDArray[Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 3.0))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, side, colour in zip(panels, ("accurate", "robust"), (palette.accurate, palette.robust), strict=True):
        for kind, line in zip(KINDS, ("-", "--", ":"), strict=True):
            logs = np.log10(np.maximum(held[f"gradient_{kind}_of_{side}"], 1e-12)).ravel()
            counts, edges = np.histogram(logs, bins=40, density=True)
            axes.plot((edges[1:] + edges[:-1]) / 2, counts, line, color=colour, label=KINDS[kind], linewidth=1.4)
        axes.set_title(f"{side} model", loc="left", color=colour)
        axes.set_xlabel("log₁₀ of the size of a class's gradient")
    panels[0].set_ylabel("density")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, labelcolor=palette.ink)
    return figure


def _draw_correlations(palette: Palette, held: dict[str, NDArray[Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 2.4))
    panels = figure.subplots(1, 3)
    classes = held["gradient_clean_of_accurate"].shape[1]
    for axes, kind in zip(panels, KINDS, strict=True):
        found = _correlations(held[f"gradient_{kind}_of_accurate"], held[f"gradient_{kind}_of_robust"])
        image = axes.imshow(found, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none")
        axes.set_xticks([classes / 2 - 0.5, 1.5 * classes - 0.5], ["accurate", "robust"])
        sides = ["accurate", "robust"] if kind == "clean" else ["", ""]
        axes.set_yticks([classes / 2 - 0.5, 1.5 * classes - 0.5], sides, rotation=90, va="center")
        axes.set_title(KINDS[kind].replace("attacked at the ", "attacked: "), fontsize=8)
        axes.grid(visible=False)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=panels, shrink=0.8)
    return figure
