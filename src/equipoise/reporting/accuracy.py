"""Evaluated models: the headline, margins, and examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST, base_models_first
from equipoise.core.arrays import ExampleArrays
from equipoise.core.results import Difference, Result
from equipoise.core.rows import CALIBRATION, AttackRow
from equipoise.core.threat import Threat
from equipoise.reporting import certified_headline, charts
from equipoise.reporting.charts import (
    MODELS,
    Chart,
    Histogram,
    Palette,
    Panel,
    Picture,
    ReferenceLine,
)
from equipoise.reporting.section import (
    INTERVALS,
    Cell,
    RunView,
    Section,
    Table,
    model_cell,
    result_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = dict[str, dict[str, Result]]  # model → metric → result
Margins = dict[
    str, dict[str, list[float]]
]  # model → "clean" or "attacked" → margins in image order
IMAGES = {CLEAN: "clean images", WORST: "attacked images"}
NAMES = {
    "mixed": "the mixture",
    "accurate": "the accurate model",
    "robust": "the robust model",
    "adaptive": "the adaptive classifier",
    "gate": "the gated mixture",
    "plain": "plain mixing",
    "gate on MixedNUTS": "the gate on MixedNUTS",
    "NUTS map (ours)": "the NUTS map (ours)",
    "gate on the NUTS map (ours)": "the gate on the NUTS map (ours)",
    "confidence switch": "the confidence switch",
    "gate on the confidence switch": "the gate on the confidence switch",
    "best": "the best epoch",
    "last": "the last epoch",
}
SHOWN = 6  # examples


def headline(run: RunView) -> Section:
    """Accuracy of every model, clean, under each attack and in the worst case; the main result in
    words."""
    if (
        run.summary.command == "certify"
        and (certified := certified_headline.headline(run)) is not None
    ):
        return certified
    metrics = [CLEAN, WORST, *run.attacks]  # the decisive columns first: a phone shows no more
    results = [result for result in run.summary.results if result.metric in metrics]
    notes = [f"{note[:1].upper()}{note[1:]}." for note in format.data_notes(run.summary)]
    if not results:
        return Section("Results", ["This run has no accuracies.", *notes])
    results.sort(key=lambda result: base_models_first(result.model))
    by_model: Results = defaultdict(dict)
    names = format.mixture_names((result.model, result.alpha) for result in results)
    if len(set(names.values())) < len(names):  # a short name is that of another model
        names = {key: format.label(*key) for key in names}
    for result in results:
        by_model[names[result.model, result.alpha]][result.metric] = result
    pairs: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for difference in run.summary.differences:
        named = replace(
            difference, model=run.name(difference.model), versus=run.name(difference.versus)
        )
        pairs[named.model, named.versus].append(named)
    first = "mixed" if "mixed" in by_model else next((model for model, _ in pairs), "")
    fitting = _fitting_images(run, results)  # which images a figure is of comes before it
    prose = [
        fitting,
        main_result(by_model, first),
        _methods(run),
        " ".join(map(comparison, pairs.values())),
        " ".join(_conditions(results, run.threat)),
        *notes,
    ]
    tables = [
        result_table(
            f"{INTERVALS} (Clopper-Pearson)",
            "model",
            results,
            columns=metrics,
            row=lambda result: names[result.model, result.alpha],
        )
    ]
    if run.summary.differences:
        body = [
            [
                Cell(f"{run.name(item.model)} − {run.name(item.versus)}"),
                Cell(item.metric or ""),
                Cell(format.points(item.value), format.bounds(item)),
                Cell(str(item.n)),
            ]
            for item in run.summary.differences
        ]
        tables.append(
            Table(
                "Paired differences on the same images in percentage points, with 95 % intervals "
                "(Bonett-Price).",
                ["models", "metric", "difference", "n"],
                body,
            )
        )
    if run.summary.audits:
        tables.append(_audit_table(run))
    return Section(
        "Accuracy on the fitting images" if fitting else "Results",
        [text for text in prose if text],
        tables,
    )


def _methods(run: RunView) -> str:
    """The rules of the mixtures."""
    fit = run.summary.fit
    if fit is not None and fit.method:
        return f"The mixture is fitted by this rule: {fit.method}."
    rules = "; ".join(f"{run.name(model)}: {rule}" for model, rule in run.summary.methods.items())
    return f"Rules of the mixtures: {rules}." if rules else ""


def _fitting_images(run: RunView, results: Sequence[Result]) -> str:
    """Of a fit: that its accuracies are those on fitting images, and what those images were used
    for."""
    if run.summary.command != "fit":
        return ""
    if run.summary.gate is not None:
        return "These are the images that selected the range of the gate, so its accuracies are optimistic."
    if run.summary.fit is None:
        return ""
    half = {row.index for row in run.rows if isinstance(row, AttackRow) and row.half == CALIBRATION}
    if any(result.n > len(half) for result in results):
        selecting = (
            "half of which selected the map" if half else "all of which selected the mixture"
        )
        return f"These are the fitting images, {selecting}, so its accuracies are optimistic."
    return (
        f"These are fitting images: the half that did not select the map, n = {len(half)}. It did set the "
        "threshold, so the attacked accuracy of the mixture is what the target allows, not a measurement."
    )


def _half_of_the_fit(run: RunView) -> str:
    """Of a fit: which images figures from its rows are of."""
    if run.summary.command != "fit" or not any(
        isinstance(row, AttackRow) and row.half == CALIBRATION for row in run.rows
    ):
        return ""
    return " They are the fitting images that did not select the map."


def _audit_table(run: RunView) -> Table:
    audits = run.summary.audits
    body = [
        [
            model_cell(run.name(item.model), item.attack),
            Cell(f"{item.audited} of {item.survivors}"),
            Cell(str(item.broken)),
            Cell(
                f"{format.number(100 * item.gap, 1)} points",
                f"run --attack {item.stronger}" if item.is_poor else "",
            ),
            Cell(str(item.passes)),
            Cell("" if item.seconds is None else f"{item.seconds:.0f}"),
        ]
        for item in audits
    ]
    stronger = " and ".join(dict.fromkeys(item.stronger for item in audits))
    return Table(
        f"Audit: {stronger} on a random sample of the survivors; what it broke counts as broken in the worst "
        "case, not in the accuracy under the attack. The gap is the most by which that accuracy may lie above "
        f"the one under {stronger}, with 95 % confidence (exact, hypergeometric).",
        ["model and attack", "audited", "broken", "gap", "passes", "seconds"],
        body,
    )


def main_result(results: Results, first: str = "mixed") -> str:
    """The accuracies of at most three models as a sentence, the model `first` at its start."""
    order = sorted(results, key=lambda model: model != first)[:3]
    metrics = [metric for metric in IMAGES if metric in results[order[0]]] if order else []
    if not metrics or any(metrics[0] not in results[model] for model in order):
        return (
            "The models of this run were measured in different ways; the table shows all results."
        )
    shares = [
        [
            format.percent(results[model][metric].value)
            for metric in metrics
            if metric in results[model]
        ]
        for model in order
    ]
    main = " and ".join(
        f"{share} of {IMAGES[metric]}" for share, metric in zip(shares[0], metrics, strict=True)
    )
    others = [
        f"{NAMES.get(model, model)} {' and '.join(own)}"
        f"{' of the clean ones (it was not attacked)' if len(own) < len(metrics) else ''}"
        for model, own in zip(order[1:], shares[1:], strict=True)
    ]
    name = NAMES[order[0]][:1].upper() + NAMES[order[0]][1:] if order[0] in NAMES else order[0]
    return f"{name} classifies {main} correctly{'; ' if others else ''}{', '.join(others)}."


def comparison(differences: Sequence[Difference]) -> str:
    """What one model gains and loses compared with another; an interval that includes zero shows no
    difference."""
    changes, unclear = [], []
    for item in differences:
        where = "under attack" if item.metric == WORST else f"on {item.metric} images"
        if item.low <= 0 <= item.high:
            unclear.append(where)
        else:
            points = format.number(100 * abs(item.value), 1)
            changes.append(f"{'gains' if item.value > 0 else 'loses'} {points} points {where}")
    if unclear:
        changes.append(f"shows no clear difference {' or '.join(unclear)}")
    names = [NAMES.get(model, model) for model in (differences[0].versus, differences[0].model)]
    return f"Compared with {names[0]} on the same images, {names[1]} {' and '.join(changes)}."


def _conditions(results: Sequence[Result], threat: Threat | None) -> list[str]:
    sentences = []
    if threat is not None:
        norm, _, eps = str(threat).partition(" ≤ ")
        sentences.append(
            {
                "linf": f"The attacker may change every pixel by up to {eps} of its range ({norm}).",
                "l2": f"The attacker may change the image by up to {eps} in Euclidean length ({norm}).",
                "l1": f"The attacker may change pixels by up to {eps} of their range in all ({norm}).",
            }[threat.norm]
        )
    if any(result.metric == WORST for result in results):
        sentences.append(
            "In the worst case, an image counts only if it is classified correctly without an attack and "
            "under every attack."
        )
    return sentences


def margins(run: RunView) -> Section | None:
    """Histograms of the signed margins of each model, clean and in the worst case over the
    attacks."""
    by_model = collect_margins(run)
    if not by_model:
        return None
    counts = format.counts(len(own[CLEAN]) for own in by_model.values())
    prose = [
        "The margin of an image is the probability of its true class minus the largest other probability; it is "
        f"positive if the image is classified correctly. Filled: n = {counts} clean images. Outlined: the same "
        f"images at their smallest margin, clean or under any attack.{_half_of_the_fit(run)}"
    ]
    widest = max(
        1.0,
        *(abs(value) for own in by_model.values() for values in own.values() for value in values),
    )
    bins = np.linspace(-widest, widest, 41).tolist()
    panels = [
        Panel(
            [
                *(
                    Histogram(
                        values=values, bins=bins, color=color, label=images, filled=images == CLEAN
                    )
                    for images, values in by_model[model].items()
                ),
                ReferenceLine(x=0.0),
            ],
            title=run.name(model),
            title_color=color,
        )
        for model, color in charts.model_colors(by_model).items()
    ]
    alt = (
        f"Histograms of signed margins, clean and attacked, of {', '.join(map(run.name, by_model))}"
    )
    chart = Chart(
        "margins",
        alt,
        panels,
        x_label="signed margin",
        y_label="images",
        height=0.6 + 1.25 * len(panels),
    )
    return Section("Margins", prose, pictures=[chart])


def collect_margins(run: RunView) -> Margins:
    """Margins of the images on which a model was measured clean and under each of its attacks."""
    table: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in run.rows:
        if isinstance(row, AttackRow) and row.margin is not None and row.alpha is None:
            table[row.model][row.attack][row.index] = row.margin
    by_model: Margins = {}
    for model in sorted(table, key=base_models_first):
        clean = table[model].pop(CLEAN, {})
        attacks = list(table[model].values())
        common = sorted(set(clean).intersection(*attacks)) if attacks else []
        if common:
            by_model[model] = {
                CLEAN: [clean[i] for i in common],
                "attacked": [min(margin[i] for margin in [clean, *attacks]) for i in common],
            }
    return by_model


def examples(run: RunView) -> Section | None:
    """The first few examples of the run."""
    arrays = ExampleArrays.load(run.folder)
    if arrays is None or not len(arrays.clean):
        return None
    count = len(arrays.clean)
    within = f" within {run.threat}" if run.threat else ""
    number = f"{SHOWN} of {count}" if count > SHOWN else str(count)
    wrong = int((arrays.predicted[:SHOWN, MODELS.index("mixed")] != arrays.label[:SHOWN]).sum())
    prose = [
        f"{number} examples: the clean image, the image after an attack{within}, their difference amplified "
        f"×{amplification(arrays):.0f} around mid-grey, and the predictions of the three models for the attacked "
        f"image. They were chosen, not drawn at random: on {wrong} of those shown the mixture fails under an "
        "attack on itself; on the others an attack on the accurate model breaks that model, and the mixture keeps "
        "the image. The table of results shows how often that happens."
    ]
    alt = "Clean images, attacked images, their amplified difference, and the predictions of the three models"
    return Section(
        "Examples of attacked images",
        prose,
        pictures=[Picture("examples", alt, lambda palette: draw_examples(palette, arrays))],
    )


def amplification(arrays: ExampleArrays) -> float:
    """How far the differences can be amplified without leaving the range of a pixel."""
    largest = int(
        np.abs(arrays.attacked[:SHOWN].astype(int) - arrays.clean[:SHOWN].astype(int)).max()
    )
    return max(1.0, 127 / largest) if largest else 1.0


def draw_examples(palette: Palette, arrays: ExampleArrays) -> Figure:
    """One row per example; wrong predictions are marked by a cross and by colour."""
    from matplotlib.figure import Figure

    clean, attacked, factor = arrays.clean[:SHOWN], arrays.attacked[:SHOWN], amplification(arrays)
    difference = np.clip(127.5 + factor * (attacked.astype(float) - clean), 0, 255).astype(np.uint8)
    figure = Figure(figsize=(charts.WIDTH, 0.28 + 1.1 * len(clean)))
    grid = figure.subplots(len(clean), 4, squeeze=False, width_ratios=[1, 1, 1, 1.9])
    for axes, title in zip(
        grid[0], ("clean", "attacked", f"difference ×{factor:.0f}", ""), strict=True
    ):
        axes.set_title(title, color=palette["muted"], fontsize=8)
    for i, row in enumerate(grid):
        for axes, images in zip(row[:3], (clean, attacked, difference), strict=True):
            pixels = images[i].transpose(1, 2, 0)
            axes.imshow(
                pixels.squeeze(2) if pixels.shape[2] == 1 else pixels,
                cmap="gray",
                vmin=0,
                vmax=255,
                interpolation="none",
            )
            axes.set_axis_off()
        _draw_predictions(row[3], palette, arrays, i)
    return figure


def _draw_predictions(axes: Axes, palette: Palette, arrays: ExampleArrays, i: int) -> None:
    axes.set_axis_off()
    axes.text(0.04, 0.84, "label", color=palette["muted"], fontsize=8, va="center")
    axes.text(
        0.42,
        0.84,
        format.class_name(arrays.class_names, int(arrays.label[i])),
        fontsize=8,
        va="center",
    )
    for height, model, predicted in zip(
        (0.60, 0.38, 0.16), MODELS, arrays.predicted[i], strict=True
    ):
        correct = predicted == arrays.label[i]
        axes.text(0.04, height, model, color=palette[model], fontsize=8, va="center")
        name = format.class_name(arrays.class_names, int(predicted))
        axes.text(
            0.42,
            height,
            f"{'✓' if correct else '✗'} {name}",
            fontsize=8,
            va="center",
            color=palette["ink"] if correct else palette["wrong"],
            fontweight="normal" if correct else "bold",
        )
