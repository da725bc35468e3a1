"""Mixtures with a trained gate: the oracle bound, the alphas it assigns, the trade-off, and how it
was trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result
from equipoise.core.rows import AttackRow
from equipoise.reporting.charts import CORRECT, Chart, Histogram, Line, Panel
from equipoise.reporting.section import (
    INTERVALS,
    Cell,
    RunView,
    Section,
    Table,
    result_cell,
    result_table,
)

STUDY = "adaptive-smoothing"
# Runs of earlier versions have the confidence switch under the name of MixedNUTS.
GATED = (
    "gate",
    "gate on the confidence switch",
    "gate on the NUTS map (ours)",
    "gate on MixedNUTS",
)
# Colour and marker of every family of mixtures.
FAMILIES = {
    "plain": ("muted", "s"),
    "confidence switch": ("other_0", "^"),
    "MixedNUTS": ("other_0", "^"),
    "gate": ("mixed", "o"),
    "gate on the confidence switch": ("wrong", "D"),
    "gate on MixedNUTS": ("wrong", "D"),
    "NUTS map (ours)": ("other_0", "^"),
    "gate on the NUTS map (ours)": ("wrong", "D"),
}
ADVERSARIES = {
    "A": "PGD without the gate's gradient",
    "B": "PGD through the gate",
    "C": "an attack suite (AutoAttack) through the gate",
    "D": "the suite of C with a loss term that lowers alpha",
    "std": "PGD on the accurate model",
    "rob": "PGD on the robust model",
}
JOINT = "C and D"


def oracle_gate(run: RunView) -> Section | None:
    """The bound of Theorem 4.1 for every result, and how the mixtures were selected."""
    bounds = run.summary.oracle_gate
    if run.identity.get("study") != STUDY or not bounds:
        return None
    attacks = [
        attack
        for attack in (CLEAN, *ADVERSARIES)
        if any(result.metric == attack for result in bounds)
    ]
    prose = [
        "An oracle gate knows the label and picks the best alpha in [0, 1] for every image. The table shows its "
        "accuracy on the images that each adversary produced. The gap between a result and its bound is what a "
        "better gate could gain against this attack. No gate over these two models can gain more on these images.",
        "Adversaries: "
        + "; ".join(f"{name} is {ADVERSARIES[name]}" for name in attacks if name in ADVERSARIES)
        + ". Without a gate, A equals B and D equals C. The loss term of D can also mislead an attack, so C and D "
        "are also counted together.",
    ]
    tables = [
        result_table(
            "Images that an oracle gate would classify correctly, with exact 95 % intervals",
            "model",
            _without_alpha(bounds),
            columns=attacks,
        )
    ]
    if joint := run.summary.joint:
        models = {result.model for result in joint}
        clean = [
            result
            for result in _without_alpha(run.summary.results)
            if result.model in models and result.metric == CLEAN
        ]
        tables.append(
            result_table(
                f"{INTERVALS}, clean and under C and D together",
                "model",
                [*joint, *clean],
                columns=(CLEAN, JOINT),
            )
        )
    if selections := run.summary.selections:
        body = [
            [
                Cell(name),
                Cell(item.mixture),
                Cell(format.percent(item.clean)),
                Cell(format.percent(item.attacked), "" if item.met else "below the target"),
            ]
            for name, item in selections.items()
        ]
        first = next(iter(selections.values()))
        caption = (
            f"Selected on held-out images to keep {format.percent(first.keep or 0.0)} of the robust model's "
            f"accuracy under a short attack ({format.percent(first.target or 0.0)}). These numbers are "
            "optimistic: they are from the images used for the selection."
        )
        tables.append(
            Table(
                caption,
                ["family", "mixture", "clean", "attacked"],
                body,
                is_text=True,
                collapsed=True,
            )
        )
    return Section("Upper bound by an oracle gate", prose, tables)


def _without_alpha(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result.alpha is None]


def alphas(run: RunView) -> Section | None:
    """Histograms of the alpha that the gate assigns to clean and to attacked images."""
    if run.identity.get("study") != STUDY:
        return None
    groups: dict[str, dict[str, list[float]]] = {}
    for model in GATED:
        by_attack = {
            attack: [
                row.image_alpha
                for row in run.rows
                if isinstance(row, AttackRow)
                and row.model == model
                and row.attack == attack
                and row.image_alpha is not None
            ]
            for attack in (CLEAN, "B", "D")
        }
        if all(by_attack.values()):
            groups[model] = by_attack
    if not groups:
        return None
    medians = [
        f"Median alpha of {model}: "
        + ", ".join(
            f"{np.median(values):.3f} {'on clean images' if attack == CLEAN else f'under {attack}'}"
            for attack, values in by_attack.items()
        )
        + "."
        for model, by_attack in groups.items()
    ]
    prose = [
        " ".join(medians),
        "Alpha is the weight that the gate gives to the robust model. A gate that cannot be "
        "fooled assigns larger alphas to attacked images than to clean ones; adversary D tries to lower them.",
    ]
    styles = {
        CLEAN: ("accurate", True, "-"),
        "B": ("robust", False, "-"),
        "D": ("wrong", False, "--"),
    }
    panels = []
    for model, by_attack in groups.items():
        every = np.concatenate([np.asarray(values) for values in by_attack.values()])
        low, high = float(every.min()), float(every.max()) + 1e-6
        bins = np.linspace(low, high, 31).tolist()
        marks = [
            Histogram(
                values=by_attack[attack],
                bins=bins,
                color=color,
                label=attack,
                filled=filled,
                linestyle=linestyle,
            )
            for attack, (color, filled, linestyle) in styles.items()
        ]
        panels.append(Panel(marks, title=model, x_range=(low, high)))
    chart = Chart(
        "gate-alphas",
        "Histograms of alpha on clean and attacked images",
        panels,
        x_label="alpha",
        y_label="images",
        height=0.2 + 2.0 * len(panels),
    )
    return Section("Alpha assigned by the gate", prose, pictures=[chart])


def trade_off(run: RunView) -> Section | None:
    """Clean accuracy against accuracy under C and D, of mixtures with and without a gate."""
    parts = [
        part
        for name in ("trade-off", "trade-off-gates")
        if (part := run.subrun(name, STUDY)) is not None
    ]
    if not parts:
        return None
    points: dict[str, list[tuple[str, Result, Result]]] = {family: [] for family in FAMILIES}
    for part in (run, *parts):
        for joint in part.summary.joint:
            family, _, share = (
                (joint.model, "", "") if part is run else joint.model.rpartition(", ")
            )
            if part is run and (selection := run.summary.selections.get(family)) is not None:
                share = f"{selection.keep:g}"
            clean = part.find(joint.model, CLEAN)
            if family in points and clean is not None:
                points[family].append(
                    (f"{family}, keeps {share}" if share else family, clean, joint)
                )
    points = {
        family: sorted(own, key=lambda point: point[1].value)
        for family, own in points.items()
        if own
    }
    prose = [
        "Further up and to the right is better. Each point was selected on held-out images to keep a given share "
        "of the robust model's accuracy, and is measured here on n = "
        f"{parts[0].summary.results[0].n} other images under the attack suites C and D. Bars are exact 95 % "
        "intervals."
    ]
    if run.summary.leads:
        leads = "; ".join(
            f"{lead.model} compared with {lead.versus} {format.points(lead.value)} "
            f"({format.points(lead.low)} to {format.points(lead.high)})"
            for lead in run.summary.leads
        )
        prose.append(
            "Lead in clean accuracy at equal accuracy under C and D, in percentage points with 95 % intervals "
            f"over images: {leads}. Mixtures without a gate are interpolated linearly between their points."
        )
    body = [
        [Cell(name), result_cell(clean), result_cell(joint)]
        for own in points.values()
        for name, clean, joint in own
    ]
    lines = [
        Line.of(
            [100 * clean.value for _, clean, _ in own],
            [joint for *_, joint in own],
            FAMILIES[family][0],
            family,
            marker=FAMILIES[family][1],
            bars=True,
        )
        for family, own in points.items()
    ]
    chart = Chart(
        "gate-trade-off",
        "Accuracy under C and D against clean accuracy",
        [Panel(lines)],
        x_label="clean accuracy, %",
        y_label="accuracy under C and D, %",
        height=3.4,
    )
    return Section(
        "Trade-off under adversaries C and D",
        prose,
        [Table(f"{INTERVALS}.", ["mixture", "clean", JOINT], body)],
        [chart],
    )


def fixed_alphas(run: RunView) -> Section | None:
    """Attacks on a mixture with a fixed alpha, which ignore the gate [Bai2022, Figure 7]."""
    if (part := run.subrun("aimed", STUDY)) is None:
        return None
    curves = {family: curve for family in FAMILIES if (curve := part.curve(family, WORST))}
    strongest = [min(curve, key=lambda result: result.value) for curve in curves.values()]
    lowest = "; ".join(
        f"{item.model} {format.percent(item.value)} at alpha {item.alpha:g}" for item in strongest
    )
    prose = [
        "These attacks ignore the gate: PGD on the mixture with the fixed alpha on the axis, evaluated on each "
        f"mixture. Lowest accuracies: {lowest}."
    ]
    lines = [
        Line.of(
            [result.alpha or 0.0 for result in curve],
            curve,
            FAMILIES[family][0],
            family,
            interval=False,
            marker=FAMILIES[family][1],
        )
        for family, curve in curves.items()
    ]
    chart = Chart(
        "gate-fixed-alphas",
        "Accuracy against the alpha of the attacked mixture",
        [Panel(lines)],
        x_label="alpha of the attacked mixture",
        y_label=CORRECT,
    )
    return Section("Attacks that ignore the gate", prose, pictures=[chart])


def settings(run: RunView) -> Section | None:
    """Gates trained against A, B and C under every adversary [Bai2024, Tables 2 and 3]."""
    if (part := run.subrun("settings", STUDY)) is None:
        return None
    prose = [
        "A gate is only as robust as the strongest attack it was trained against. Each gate was trained against "
        "one kind of attack; all use the full range of alpha and the scale and shift of training."
    ]
    return Section(
        "Gates by training attack",
        prose,
        [_table(part.summary.results, (CLEAN, "A", "B", "C", "D"))],
    )


def ablation(run: RunView) -> Section | None:
    """Loss weights and the scale before the sigmoid, at one clean accuracy [Bai2024, Tables 6 and
    7]."""
    if (part := run.subrun("ablation", STUDY)) is None:
        return None
    prose = [
        "Differences within the intervals are not significant. Each gate was trained against adversary B and then "
        f"shifted to a clean accuracy of {format.percent(part.summary.clean_target or 0.0)} on held-out images, "
        "half-way between the base models; `constant` is the mixture with a fixed alpha of that accuracy."
    ]
    captions = {False: "Weights of the loss. ", True: "Scale of the gate before the sigmoid. "}
    return Section(
        "Loss weights and scale",
        prose,
        [
            _table(
                [
                    result
                    for result in part.summary.results
                    if result.model.startswith("scale") == is_scale
                ],
                (CLEAN, "B"),
                caption,
            )
            for is_scale, caption in captions.items()
        ],
    )


def _table(results: Sequence[Result], metrics: Sequence[str], title: str = "") -> Table:
    return result_table(title + INTERVALS, "gate", _without_alpha(results), columns=metrics)
