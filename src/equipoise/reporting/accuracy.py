"""Accuracies in detail: under every attack, and by class."""

from __future__ import annotations

from equipoise.core import aggregation, format, stats
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import AttackedArrays, PictureArrays
from equipoise.reporting import charts
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import (
    MISSING,
    Cell,
    Figure,
    Records,
    Section,
    Table,
    metric_name,
    result_table,
)

MOST_CLASSES = 30  # of a figure
MOST_MODELS = 6
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
    models = list(dict.fromkeys(record["model"] for record in records))[:MOST_MODELS]
    figure = charts.dots(
        "accuracy",
        "Accuracy under each attack, with 95 % intervals",
        [record for record in records if record["model"] in models],
        run.colours,
        x="images classified correctly",
        rows=[metric_name(metric) for metric in metrics],
    )
    caption = "Share of images classified correctly, with 95 % intervals (Clopper-Pearson)."
    mixtures = [(model, alpha) for model, alpha in run.mixtures if alpha is None]
    tables = [result_table(run, caption, mixtures, metrics)]
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
        rows.append([Cell(pair), Cell(metric_name(item.metric or "")), value, Cell(str(item.n))])
    caption = "Paired differences on the same images in points, with 95 % intervals (Bonett-Price)."
    return Table(caption, ["models", "metric", "difference", "n"], rows)


def classes(run: RunView) -> Section | None:
    """Clean and robust accuracy of every class, and what is taken for what."""
    if not run.attacks:
        return None
    items = aggregation.by_class(run.rows)
    labels = sorted({item.label for item in items})
    if len(labels) < 2:
        return None
    names = class_names(run)
    models = list(dict.fromkeys(item.model for item in items))[:MOST_MODELS]
    found = {(item.label, item.model): item for item in items}
    records: Records = []
    rows = []
    for label in labels:
        row = [Cell(format.class_name(names, label))]
        for model in models:
            item = found.get((label, model))
            if item is None:
                row.append(MISSING)
                continue
            clean, robust = item.clean / item.n, item.attacked / item.n
            row.append(Cell(f"{format.percent(clean)} / {format.percent(robust)}", f"n = {item.n}"))
            record = {"row": row[0].text, "model": run.name(model), "n": item.n}
            records.append(record | charts.fields(stats.of_share(robust, item.n), "value"))
        rows.append(row)
    caption = "Accuracy by class: clean / robust, and the number of images."
    table = Table(caption, ["class", *map(run.name, models)], rows, collapsed=True)
    figures = []
    if len(labels) <= MOST_CLASSES:
        title = "Robust accuracy by class, with 95 % intervals"
        shown = [row[0].text for row in rows]
        figures.append(
            charts.dots("classes", title, records, run.colours, x="robust accuracy", rows=shown)
        )
        figures += _confusion(run, models, labels)
    return Section("By class", figures=figures, tables=[table])


def class_names(run: RunView) -> tuple[str, ...]:
    """The names of the classes, as far as the run has them."""
    for kind in (PictureArrays, AttackedArrays):
        arrays = kind.load(run.folder)
        if arrays is not None:
            return arrays.class_names
    return ()


def _confusion(run: RunView, models: list[str], labels: list[int]) -> list[Figure]:
    """How often images of one class are taken for another, clean and under attack."""
    names = class_names(run)
    counts: dict[tuple[str, int, int], int] = {}
    for model in models:
        for rows in run.attacked_images.get(model, {}).values():
            shown = {CLEAN_IMAGES: rows[0], ATTACKED_IMAGES: aggregation.worst_row(rows)}
            for kind, row in shown.items():
                if row.predicted is not None and not row.correct:
                    key = (f"{run.name(model)}, {kind}", row.label, row.predicted)
                    counts[key] = counts.get(key, 0) + 1
    if not counts:
        return []
    records: Records = []
    for (choice, label, predicted), count in counts.items():
        x, y = format.class_name(names, predicted), format.class_name(names, label)
        records.append({"choice": choice, "x": x, "y": y, "value": count})
    records.reverse()  # the last model under attack is shown first
    predictions = sorted({predicted for _, _, predicted in counts} | set(labels))
    return [
        charts.heat(
            "confusion",
            "What misclassified images are taken for",
            records,
            x="predicted class",
            y="true class",
            value="images",
            choice="Model and images:",
            columns=[format.class_name(names, label) for label in predictions],
            rows=[format.class_name(names, label) for label in labels],
        )
    ]
