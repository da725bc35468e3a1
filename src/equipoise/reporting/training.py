"""How a model was trained: loss and accuracies of every epoch."""

from __future__ import annotations

from collections.abc import Mapping

from equipoise.core import stats
from equipoise.core.format import percent
from equipoise.core.rows import EpochRow
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
    result_table,
)

# What an accuracy is called; training accuracy is that on the inputs of the objective.
LABELS = {
    "accuracy": "on training inputs",
    "clean": "held out, clean",
    "attacked": "held out, under PGD",
    "noisy": "held out, under noise",
}
COLOURS = dict(zip(LABELS.values(), ("muted", "accurate", "robust", "mixed"), strict=True))


def epochs(run: RunView) -> list[EpochRow]:
    """The epochs so far."""
    return [row for row in run.rows if isinstance(row, EpochRow)]


def measured(row: EpochRow) -> Mapping[str, float]:
    """What an epoch measured, by name."""
    return {"loss": row.loss, "rate": row.lr, "accuracy": row.accuracy, **row.validation}


def verdict(run: RunView) -> Section:
    """The accuracies of the best epoch on held-out images, and the curves."""
    rows, results = epochs(run), run.summary.results
    text = [f"{len(rows)} epochs {'so far' * (not run.finished)}".strip() + "."]
    tables = []
    if results:
        first = results[0]
        text = [
            f"The {first.model} epoch classifies {percent(first.value)} of n = {first.n} held-out images "
            f"correctly ({LABELS.get(first.metric, first.metric)})."
        ]
        caption = "Accuracy on held-out images, with 95 % intervals."
        tables = [result_table(run, caption, run.measured, run.metrics)]
    best = run.summary.best_epoch
    if results and best is not None and best >= 0:
        text.append(
            f"The best of {len(rows)} epochs is epoch {best + 1}. It was selected on the held-out images, so its "
            "accuracy on them is optimistic; evaluate it on test images."
        )
    return Section("Verdict", text, [_accuracies(run)] if rows else [], tables)


def training(run: RunView) -> Section | None:
    """Loss, learning rate, and the numbers of every epoch."""
    rows = epochs(run)
    if not rows:
        return None
    figures = []
    for name, label in (("loss", "loss"), ("rate", "learning rate")):
        records: Records = []
        for row in rows:
            value = round(measured(row)[name], 6)
            records.append({"model": label, "x": row.index + 1, "y": value})
        figures.append(
            curve(name, f"Training, {label} of each epoch", label, records, {label: "ink"})
        )
    body = []
    for row in rows:
        line = cells(str(row.index + 1), f"{row.loss:.4f}", f"{row.lr:.4g}")
        for name in LABELS:
            share = measured(row).get(name)
            line.append(MISSING if share is None else Cell(percent(share)))
        body.append([*line, Cell(f"{row.images_per_second:.0f}")])
    head = ["epoch", "loss", "learning rate", *LABELS.values(), "images per second"]
    return Section(
        "Training", figures=figures, tables=[Table("Every epoch.", head, body, collapsed=True)]
    )


def curve(name: str, title: str, label: str, records: Records, palette: charts.Palette) -> Figure:
    """Something that every epoch measures, against the epoch."""
    is_share = label in COLOURS
    return charts.curves(
        f"training-{name}",
        title,
        records,
        palette,
        x="epoch",
        y=label,
        is_share=is_share,
        dots=len(records) < 60,
        height=180,
    )


def _accuracies(run: RunView) -> Figure:
    n = run.summary.results[0].n if run.summary.results else 0
    records: Records = []
    for name, label in LABELS.items():
        for row in epochs(run):
            value = measured(row).get(name)
            if value is None:
                continue
            record = {"model": label, "x": row.index + 1, "y": round(value, 5)}
            if n and name != "accuracy":
                record |= charts.fields(stats.of_share(value, n), "y")
            records.append(record)
    return charts.curves(
        "training",
        "Accuracy after each epoch, with 95 % intervals on held-out images",
        records,
        COLOURS,
        x="epoch",
        y="images classified correctly",
        dots=len(records) < 60,
    )
