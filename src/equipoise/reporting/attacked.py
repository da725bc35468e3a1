"""Attacks of an evaluation in detail: what broke what, accuracy by class, and pictures of attacked
images."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from equipoise.core import aggregation, format
from equipoise.core.arrays import AttackedArrays
from equipoise.core.results import BrokenCount
from equipoise.core.rows import AttackRow
from equipoise.reporting import charts
from equipoise.reporting.charts import Palette, Picture
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table, model_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLIFIED = 10  # times, for the pictures of perturbations
GAP = 0.06  # between pictures, in widths of one
COLUMNS = 7  # for which the figure has room: six pictures and the names of the rows
LINE = 12  # characters of a class name


def details(run: RunView) -> Section | None:
    """Which stage of which attack broke how many images, what is left of it in bytes, and accuracy
    by class."""
    if not run.summary.as_bytes and not any(audit.broken for audit in run.summary.audits):
        return None  # nothing was broken, or the run is of a version that did not record it
    tables = [table for table in (_broken_table(run), _class_table(run)) if table is not None]
    if not tables:
        return None
    prose = [
        "An image counts as broken if it is classified correctly without an attack and misclassified under it."
    ]
    if any(isinstance(row, AttackRow) and row.share_correct is not None for row in run.rows):
        prose[0] += (
            " Of a randomised model, most of its passes decide that; accuracies by class are mean shares of "
            "passes."
        )
    return Section("Attacks in detail", prose, tables)


def _broken_table(run: RunView) -> Table | None:
    counts = aggregation.broken_by(run.rows)
    as_bytes = {(item.model, item.metric): item for item in run.summary.as_bytes}
    body = []
    for (model, attack), own in _grouped(counts).items():
        rounded = as_bytes.get((model, attack))
        by_stage = ", ".join(
            f"{item.stage} {item.count}" for item in own if item.stage.partition("@")[0] != attack
        )
        body.append(
            [
                model_cell(run.name(model), attack),
                Cell(str(own[0].n), by_stage),
                MISSING
                if rounded is None
                else Cell(format.percent(rounded.value), f"{rounded.count} of {rounded.n}"),
            ]
        )
    return (
        Table(
            "Broken images by attack, with the stages that broke them, and the share of them that is still "
            "misclassified after rounding to bytes.",
            ["model and attack", "broken", "after rounding to bytes"],
            body,
        )
        if body
        else None
    )


def _grouped(counts: list[BrokenCount]) -> dict[tuple[str, str], list[BrokenCount]]:
    groups: dict[tuple[str, str], list[BrokenCount]] = {}
    for item in counts:
        groups.setdefault((item.model, item.attack), []).append(item)
    return groups


def _class_table(run: RunView) -> Table | None:
    items = aggregation.by_class(run.rows)
    if not items:
        return None
    pictures = AttackedArrays.load(run.folder)
    names = pictures.class_names if pictures is not None else ()
    models = list(dict.fromkeys(item.model for item in items))
    cells = {(item.label, item.model): item for item in items}
    body = []
    for label in sorted({item.label for item in items}):
        own = [cells.get((label, model)) for model in models]
        body.append(
            [
                Cell(
                    format.class_name(names, label),
                    f"n = {format.counts(item.n for item in own if item)}",
                ),
                *(
                    MISSING
                    if item is None
                    else Cell(
                        f"{format.percent(item.clean / item.n)} / "
                        f"{format.percent(item.attacked / item.n)}"
                    )
                    for item in own
                ),
            ]
        )
    return Table(
        "Accuracy by class, clean / in the worst case over all attacks.",
        ["class", *map(run.name, models)],
        body,
        collapsed=True,
    )


def pictures(run: RunView) -> Section | None:
    """A few images of the run: clean, the perturbation, and attacked."""
    arrays = AttackedArrays.load(run.folder)
    if arrays is None:
        return None
    survived = int((arrays.predicted == arrays.label).sum())
    model = format.label(run.name(arrays.model), arrays.alpha)
    prose = [
        f"{len(arrays.clean)} of the first images under {arrays.attack} on {model}: the clean image, the "
        f"perturbation ×{AMPLIFIED} around mid-grey, and the attacked image with the class predicted for it. "
        f"{len(arrays.clean) - survived} are broken, {survived} are not; where a suite of attacks breaks nothing, "
        "the clean image is shown."
    ]
    alt = "Clean images, amplified perturbations, attacked images, and the predicted classes"
    return Section(
        "Attacked images of this run",
        prose,
        pictures=[Picture("attacked", alt, lambda palette: draw_attacked(palette, arrays))],
    )


def draw_attacked(palette: Palette, arrays: AttackedArrays) -> Figure:
    """One column per image; predictions that are wrong are marked by a cross and by colour."""
    from matplotlib.figure import Figure

    clean, attacked = (
        np.clip(images.astype(np.float64), 0, 1) for images in (arrays.clean, arrays.attacked)
    )
    perturbation = np.clip(0.5 + AMPLIFIED * (attacked - clean), 0, 1)
    shown = {"clean": clean, f"perturbation\n×{AMPLIFIED}": perturbation, "attacked": attacked}
    count, _, height, width = clean.shape
    wide, tall = 1 + GAP, height / width + GAP  # of a cell, in widths of a picture
    # One pair of axes for all pictures, because axes are slow to draw.
    figure = Figure(figsize=(charts.WIDTH, 0.6 + tall * len(shown) * charts.WIDTH / COLUMNS))
    axes = figure.subplots()
    for row, images in enumerate(shown.values()):
        for column, image in enumerate(images.transpose(0, 2, 3, 1)):
            left, top = column * wide, row * tall
            axes.imshow(
                image.squeeze(2) if image.shape[2] == 1 else image,
                cmap="gray",
                vmin=0,
                vmax=1,
                interpolation="none",
                extent=(left, left + 1, top + height / width, top),
            )
    axes.set(xlim=(0, count * wide - GAP), ylim=(len(shown) * tall - GAP, 0))
    axes.grid(False)
    axes.set_yticks([row * tall + height / width / 2 for row in range(len(shown))], list(shown))
    middles, correct = (
        [column * wide + 0.5 for column in range(count)],
        arrays.predicted == arrays.label,
    )
    names, predicted = (
        [
            textwrap.fill(format.class_name(arrays.class_names, int(label)).replace("_", " "), LINE)
            for label in labels
        ]
        for labels in (arrays.label, arrays.predicted)
    )
    above = axes.secondary_xaxis("top")
    above.set_xticks(middles, names, color=palette["ink"])
    axes.set_xticks(
        middles,
        [name if right else f"✗ {name}" for name, right in zip(predicted, correct, strict=True)],
    )
    for text, right in zip(axes.get_xticklabels(), correct, strict=True):
        text.set_color(palette["ink"] if right else palette["wrong"])
    for part in (axes, above):
        part.spines[:].set_visible(False)
        part.tick_params(length=0)
    return figure
