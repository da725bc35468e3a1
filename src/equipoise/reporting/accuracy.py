"""Accuracies in detail: under every attack, and by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from equipoise.core import aggregation, format, stats
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import AttackedArrays, PictureArrays
from equipoise.core.format import percent
from equipoise.reporting import charts
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import (
    MISSING,
    Cell,
    Figure,
    Records,
    Section,
    Table,
    cells,
    metric_name,
    metric_names,
    result_table,
)

MOST_CLASSES = 30  # of a figure
CLEAN_IMAGES, ATTACKED_IMAGES = "clean images", "attacked images"


def accuracy(run: RunView) -> Section | None:
    """Accuracy of every model clean and under each attack, and paired differences."""
    metrics = [CLEAN, *run.attacks, WORST]
    records: Records = []
    for result in run.summary.results:
        name = run.name(result.model)
        if result.metric in metrics and result.alpha is None:
            record = {"row": metric_name(result.metric), "model": name, "n": result.n}
            records.append(record | charts.fields(result, "value"))
    if not run.attacks or not records:
        return None
    figure = charts.dots(
        "accuracy",
        "Accuracy under each attack, with 95 % intervals",
        records,
        run.colours,
        x="images classified correctly",
        rows=metric_names(metrics),
    )
    caption = "Share of images classified correctly, with 95 % intervals (Clopper-Pearson)."
    tables = [result_table(run, caption, run.measured, metrics)]
    if run.summary.differences:
        tables.append(_differences(run))
    text = [
        "Each attack was run on all images. Robust accuracy counts an image if no attack broke it."
    ]
    if any(result.passes for result in run.summary.results):
        text.append("Accuracies of randomised models are mean shares of their passes.")
    return Section("Accuracy under each attack", text, [figure], tables)


def _differences(run: RunView) -> Table:
    rows = []
    for item in run.summary.differences:
        pair = f"{run.name(item.model)} − {run.name(item.versus)}"
        value = Cell(format.points(item.value), format.bounds(item))
        rows.append(cells(pair, metric_name(item.metric or ""), value, str(item.n)))
    caption = "Paired differences on the same images in points, with 95 % intervals (Bonett-Price)."
    return Table(caption, ["models", "metric", "difference", "n"], rows)


def classes(run: RunView) -> Section | None:
    """Clean and robust accuracy of every class, and what is taken for what."""
    items = aggregation.by_class(run.rows)
    labels = sorted({item.label for item in items})
    if not run.attacks or len(labels) < 2:
        return None
    rows = dict(zip(labels, map(cells, class_labels(run, labels)), strict=True))
    head = ["class"]
    records: Records = []
    for item in items:
        model, clean, robust = run.name(item.model), item.clean / item.n, item.attacked / item.n
        if model not in head:
            head.append(model)
        row = rows[item.label]
        row += [MISSING] * (len(head) - 1 - len(row))
        row.append(Cell(f"{percent(clean)} / {percent(robust)}", f"n = {item.n}"))
        record = {"row": row[0].text, "model": model, "n": item.n}
        records.append(record | charts.fields(stats.of_share(robust, item.n), "value"))
    for row in rows.values():
        row += [MISSING] * (len(head) - len(row))
    caption = "Accuracy by class: clean / robust, and the number of images."
    table = Table(caption, head, list(rows.values()), collapsed=True)
    figures = []
    if len(labels) <= MOST_CLASSES:
        title = "Robust accuracy by class, with 95 % intervals"
        shown = class_labels(run, labels)
        figures.append(
            charts.dots("classes", title, records, run.colours, x="robust accuracy", rows=shown)
        )
        figures += _confusion(run, labels)
    return Section("By class", figures=figures, tables=[table])


def class_labels(run: RunView, labels: Iterable[int]) -> list[str]:
    """The names of some classes, shown literally; numbers for those without one."""
    names = class_names(run)
    return [format.class_name(names, label) for label in labels]


def class_names(run: RunView) -> tuple[str, ...]:
    """The names of the classes, as far as the run has them."""
    for kind in (PictureArrays, AttackedArrays):
        arrays = kind.load(run.folder)
        if arrays is not None:
            return arrays.class_names
    return ()


def _confusion(run: RunView, labels: list[int]) -> list[Figure]:
    """How often images of one class are taken for another, clean and under attack."""
    names = class_names(run)
    counts: Counter[tuple[str, int, int]] = Counter()
    for kind in (CLEAN_IMAGES, ATTACKED_IMAGES):
        for model, images in run.attacked_images.items():
            for rows in images.values():
                row = rows[0] if kind == CLEAN_IMAGES else aggregation.worst_row(rows)
                if row.predicted is not None and not row.correct:
                    counts[f"{run.name(model)}, {kind}", row.label, row.predicted] += 1
    if not counts:
        return []
    records: Records = []
    predictions = set(labels)
    for (choice, label, predicted), count in reversed(counts.items()):  # the last is shown first
        x, y = format.class_name(names, predicted), format.class_name(names, label)
        records.append({"choice": choice, "x": x, "y": y, "value": count})
        predictions.add(predicted)
    return [
        charts.heat(
            "confusion",
            "What misclassified images are taken for",
            records,
            x="predicted class",
            y="true class",
            value="images",
            choice="Model and images:",
            columns=class_labels(run, sorted(predictions)),
            rows=class_labels(run, labels),
        )
    ]
