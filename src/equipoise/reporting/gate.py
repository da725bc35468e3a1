"""The gate: what it says of clean and attacked images, what a perfect one could do, and how it was trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.core.records import Row
from equipoise.reporting import numbers, style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "adaptive-smoothing"
KINDS = ("plain", "MixedNUTS", "gate", "gate on MixedNUTS")
ADVERSARIES = ("A", "B", "C", "D")
SAID = {"A": "PGD that does not see the gate's gradient", "B": "PGD through the gate",
        "C": "a list of attacks (AutoAttack) through the gate",
        "D": "the same with a term that pushes alpha down", "std": "PGD on the accurate model",
        "rob": "PGD on the robust model"}
JOINT = "C and D"
BINS = 30


def _own(view: RunView) -> bool:
    return view.identity.get("study") == STUDY


def part_of(view: RunView, name: str) -> RunView | None:
    """A part of this study, where it is one and has been told."""
    return view.sub(name) if _own(view) else None


def _cell(rows: Sequence[Row], model: str, metric: str) -> Cell:
    row = next((row for row in rows if (row["model"], row["metric"]) == (model, metric) and "alpha" not in row), None)
    return Cell("–") if row is None else Cell(numbers.percent(row["value"]), numbers.interval(row["low"], row["high"]))


def named(rows: Sequence[Row]) -> list[str]:
    """The models of some results, in their order."""
    return list(dict.fromkeys(row["model"] for row in rows))


def looks(palette: Palette, shown: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a mark for every kind, always the same."""
    colours = (palette.muted, palette.others[0], palette.mixed, palette.wrong)
    every = {kind: {"color": colour, "marker": mark} for kind, colour, mark in zip(KINDS, colours, "s^oD", strict=True)}
    return {kind: look for kind, look in every.items() if kind in set(shown)}


def perfect_gate(view: RunView) -> Section | None:
    """The bound of Theorem 4.1 beside every result, and how the mixtures were chosen."""
    bounds: list[Row] = view.summary.get("bounds", []) if _own(view) else []
    if not bounds:
        return None
    attacks = [attack for attack in ("clean", *SAID) if any(row["metric"] == attack for row in bounds)]
    prose = ["The adversaries: " + "; ".join(f"{name} is {SAID[name]}" for name in attacks if name in SAID) + ". "
             "Without a gate A is B and D is C. The term of D can also lead an attack astray, so C and D are counted "
             "together as well.",
             "A perfect gate knows the label and picks the best alpha in [0, 1] for every image. On the very images "
             "that each adversary left, it would answer as many as the table says: what lies between a result and "
             "its bound is what a better gate could win against this attack, and no gate over these two models can "
             "win more on these images."]
    body = [[Cell(model), *(_cell(bounds, model, attack) for attack in attacks)] for model in named(bounds)]
    tables = [Table("Images that a perfect gate would answer rightly, with exact 95 % intervals.", ["model", *attacks],
                    body)]
    joint: list[Row] = view.summary.get("joint", [])
    if joint:
        body = [[Cell(model), _cell(view.results, model, "clean"), _cell(joint, model, JOINT)]
                for model in named(joint)]
        tables.insert(0, Table("Images answered rightly, clean and under C and D together.", ["model", "clean", JOINT],
                               body))
    chosen: dict[str, Any] = view.summary.get("matched", {})
    if chosen:
        body = [[Cell(kind), Cell(told["mixture"]), Cell(numbers.percent(told["clean"])),
                 Cell(numbers.percent(told["attacked"]), "" if told["met"] else "target not kept")]
                for kind, told in chosen.items()]
        share = next(iter(chosen.values()))
        caption = (f"Chosen on held-out images to keep {numbers.percent(share['keep'])} of the robust model's accuracy "
                   f"under a short attack ({numbers.percent(share['target'])}); these numbers flatter what they chose.")
        tables.append(Table(caption, ["kind", "mixture", "clean", "attacked"], body, words=True, folded=True))
    return Section("What a perfect gate could do", prose, tables)


def alphas(view: RunView) -> Section | None:
    """Histograms of alpha on clean and attacked images."""
    if not _own(view):
        return None
    groups = {model: {attack: [row["weight"] for row in view.rows if row["model"] == model and row["attack"] == attack]
                      for attack in ("clean", "B", "D")} for model in KINDS[2:]}
    groups = {model: held for model, held in groups.items() if all(held.values())}
    if not groups:
        return None
    told = []
    for model, held in groups.items():
        middle = {attack: float(np.median(values)) for attack, values in held.items()}
        told.append(f"{model}: median alpha {middle['clean']:.3f} on clean images, {middle['B']:.3f} under B, "
                    f"{middle['D']:.3f} under D")
    prose = ["Alpha is the weight that the gate gives to the robust model. A gate that cannot be fooled keeps attacked "
             "images to the right of clean ones; adversary D pushes them back to the left. " + "; ".join(told) + "."]

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 2.2 * len(groups)))
        panels = np.atleast_1d(figure.subplots(len(groups), 1))
        for axes, (model, held) in zip(panels, groups.items(), strict=True):
            every = np.concatenate([np.asarray(values) for values in held.values()])
            bins = np.linspace(float(every.min()), float(every.max()) + 1e-6, BINS + 1)
            axes.hist(held["clean"], bins=bins, color=palette.accurate, alpha=0.35, label="clean")
            axes.hist(held["B"], bins=bins, color=palette.robust, histtype="step", linewidth=1.4, label="B")
            axes.hist(held["D"], bins=bins, color=palette.wrong, histtype="step", linewidth=1.4, linestyle="--",
                      label="D")
            axes.set_title(model, loc="left", color=palette.ink)
            axes.locator_params(axis="y", nbins=3, integer=True)
        panels[0].legend(loc="upper center", ncols=3, labelcolor=palette.ink)
        panels[-1].set_xlabel("alpha")
        figure.supylabel("images", fontsize=9, color=palette.muted)
        return figure

    return Section("What the gate says", prose,
                   pictures=[Picture("gate-alphas", "Histograms of alpha on clean and attacked images", draw)])


def aimed_alphas(view: RunView) -> Section | None:
    """Attacks at a fixed alpha, which ignore the gate [Bai2022, Figure 7]."""
    found = part_of(view, "aimed")
    if found is None:
        return None
    curves = {kind: sorted((row for row in found.results if row["model"] == kind and row["metric"] == "aimed"),
                           key=lambda row: row["alpha"]) for kind in KINDS}
    curves = {kind: rows for kind, rows in curves.items() if rows}
    worst = [min(rows, key=lambda row: row["value"]) for rows in curves.values()]
    said = "; ".join(f"{row['model']} {numbers.percent(row['value'])} at {row['alpha']:g}" for row in worst)
    prose = ["PGD on the fixed mixture with the alpha on the axis, judged by each mixture: attacks that do not look at "
             f"the gate at all. The strongest aims: {said}."]

    def draw(palette: Palette) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, 3.0))
        axes = figure.subplots()
        for kind, look in looks(palette, curves).items():
            axes.plot([row["alpha"] for row in curves[kind]], [100 * row["value"] for row in curves[kind]], label=kind,
                      **look)
        axes.set(xlabel="alpha at which the attack aims", ylabel="answered rightly, %")
        axes.legend(labelcolor=palette.ink)
        return figure

    return Section("Attacks that ignore the gate", prose,
                   pictures=[Picture("gate-aimed", "Accuracy against the alpha at which an attack aims", draw)])


def settings(view: RunView) -> Section | None:
    """Gates trained against A, B and C under every adversary [Bai2024, Tables 2 and 3]."""
    found = part_of(view, "settings")
    if found is None:
        return None
    attacks = ("clean", *ADVERSARIES)
    body = [[Cell(model), *(_cell(found.results, model, attack) for attack in attacks)]
            for model in named(found.results)]
    prose = ["One gate per kind of training attack, all over the full range of alpha and with the scale and shift of "
             f"training; n = {found.results[0]['n']} images. A gate is only as good as the strongest attack that it "
             "has met."]
    return Section("Which attacks to train against", prose,
                   [Table("Images answered rightly, with exact 95 % intervals.", ["gate", *attacks], body)])


def ablation(view: RunView) -> Section | None:
    """Loss weights and the scale before the sigmoid, at one clean accuracy [Bai2024, Tables 6 and 7]."""
    found = part_of(view, "ablation")
    if found is None:
        return None
    tables = []
    for title, names in (("Weights of the loss.", [m for m in named(found.results) if not m.startswith("scale")]),
                         ("Scale of the gate before the sigmoid.",
                          [m for m in named(found.results) if m.startswith("scale")])):
        body = [[Cell(model), *(_cell(found.results, model, attack) for attack in ("clean", "B"))] for model in names]
        tables.append(Table(f"{title} Images answered rightly, with exact 95 % intervals.", ["gate", "clean", "B"],
                            body))
    prose = ["Every gate was trained against adversary B and then shifted, so that on held-out images it answers "
             f"{numbers.percent(found.summary['clean_target'])} of the clean ones, half-way between both bases; "
             "`constant` is the fixed mixture of that accuracy. Differences within the intervals are none."]
    return Section("Loss weights and scale", prose, tables)
