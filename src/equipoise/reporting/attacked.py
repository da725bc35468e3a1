"""Attacks of an evaluation in detail: what broke what, accuracy by class, and pictures of attacked images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.core import aggregation, format
from equipoise.core.arrays import Array, AttackedArrays
from equipoise.core.results import BrokenCount
from equipoise.core.rows import AttackRow
from equipoise.reporting import charts
from equipoise.reporting.charts import Palette, Picture
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table, model_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AMPLIFIED = 10  # times, for the pictures of perturbations


def details(run: RunView) -> Section | None:
    """Which stage of which attack broke how many images, what is left of it in bytes, and accuracy by class."""
    if not run.summary.as_bytes and not any(audit.broken for audit in run.summary.audits):
        return None  # nothing was broken, or the run is of a version that did not record it
    tables = [table for table in (_broken_table(run), _class_table(run)) if table is not None]
    if not tables:
        return None
    prose = ["An image counts as broken if it is classified correctly without an attack and misclassified under it."]
    if any(isinstance(row, AttackRow) and row.share_correct is not None for row in run.rows):
        prose[0] += (" Of a randomised model, most of its passes decide that; accuracies by class are mean shares of "
                     "passes.")
    return Section("Attacks in detail", prose, tables)


def _broken_table(run: RunView) -> Table | None:
    counts = aggregation.broken_by(run.rows)
    as_bytes = {(item.model, item.metric): item for item in run.summary.as_bytes}
    body = []
    for (model, attack), own in _grouped(counts).items():
        rounded = as_bytes.get((model, attack))
        by_stage = ", ".join(f"{item.stage} {item.count}" for item in own
                             if item.stage.partition("@")[0] != attack)
        body.append([model_cell(run.name(model), attack), Cell(str(own[0].n), by_stage),
                     MISSING if rounded is None else Cell(format.percent(rounded.value), f"{rounded.count} of "
                                                                                         f"{rounded.n}")])
    return Table("Broken images by attack, with the stages that broke them, and the share of them that is still "
                 "misclassified after rounding to bytes.",
                 ["model and attack", "broken", "after rounding to bytes"], body) if body else None


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
        body.append([Cell(format.class_name(names, label), f"n = {format.counts(item.n for item in own if item)}"), *(
            MISSING if item is None else Cell(f"{format.percent(item.clean / item.n)} / "
                                              f"{format.percent(item.attacked / item.n)}") for item in own)])
    return Table("Accuracy by class, clean / in the worst case over all attacks.",
                 ["class", *map(run.name, models)], body, collapsed=True)


def pictures(run: RunView) -> Section | None:
    """A few images of the run: clean, the perturbation, and attacked."""
    arrays = AttackedArrays.load(run.folder)
    if arrays is None:
        return None
    survived = int((arrays.predicted == arrays.label).sum())
    model = format.label(run.name(arrays.model), arrays.alpha)
    prose = [f"{len(arrays.clean)} of the first images under {arrays.attack} on {model}: the clean image, the "
             f"perturbation ×{AMPLIFIED} around mid-grey, and the attacked image with the class predicted for it. "
             f"{len(arrays.clean) - survived} are broken, {survived} are not; where a suite of attacks breaks nothing, "
             "the clean image is shown."]
    alt = "Clean images, amplified perturbations, attacked images, and the predicted classes"
    return Section("Attacked images of this run", prose, pictures=[
        Picture("attacked", alt, lambda palette: draw_attacked(palette, arrays))])


def draw_attacked(palette: Palette, arrays: AttackedArrays) -> Figure:
    """One column per image; predictions that are wrong are marked by a cross and by colour."""
    from matplotlib.figure import Figure

    clean, attacked = (np.clip(images.astype(np.float64), 0, 1) for images in (arrays.clean, arrays.attacked))
    shown = (clean, np.clip(0.5 + AMPLIFIED * (attacked - clean), 0, 1), attacked)
    figure = Figure(figsize=(charts.WIDTH, 4.2))
    grid = figure.subplots(3, len(clean), squeeze=False)
    for row, (images, title) in enumerate(zip(shown, ("clean", f"perturbation ×{AMPLIFIED}", "attacked"), strict=True)):
        for column, axes in enumerate(grid[row]):
            values = images[column].transpose(1, 2, 0)
            axes.imshow(values.squeeze(2) if values.shape[2] == 1 else values, cmap="gray", vmin=0, vmax=1,
                        interpolation="none")
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(title, color=palette["muted"], fontsize=8)
    for column, axes in enumerate(grid[0]):
        axes.set_title(format.class_name(arrays.class_names, int(arrays.label[column])), fontsize=8)
    for column, axes in enumerate(grid[2]):
        _mark_prediction(axes, palette, arrays, column)
    return figure


def _mark_prediction(axes: Axes, palette: Palette, arrays: AttackedArrays, column: int) -> None:
    predicted: Array = arrays.predicted[column]
    correct = bool(predicted == arrays.label[column])
    axes.set_xlabel(f"{'' if correct else '✗ '}{format.class_name(arrays.class_names, int(predicted))}", fontsize=8,
                    color=palette["ink"] if correct else palette["wrong"])
