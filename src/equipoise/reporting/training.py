"""How a model was trained: loss and accuracies of every epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equipoise.core import format, stats
from equipoise.core.rows import EpochRow
from equipoise.reporting import charts
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import MISSING, Cell, Figure, Records, Section, Table, result_cell

# What an accuracy is called, and its colour; training accuracy is that on the inputs of the objective.
ACCURACIES = {
    "accuracy": ("on training inputs", "muted"),
    "clean": ("held out, clean", "accurate"),
    "attacked": ("held out, under PGD", "robust"),
    "noisy": ("held out, under noise", "mixed"),
}

LABELS = {name: label for name, (label, _) in ACCURACIES.items()}


def epochs(run: RunView) -> list[EpochRow]:
    """The epochs so far."""
    return [row for row in run.rows if isinstance(row, EpochRow)]


def accuracies(row: EpochRow) -> Mapping[str, float]:
    """The accuracies of an epoch by name."""
    return {"accuracy": row.accuracy, **row.validation}


def verdict(run: RunView) -> Section:
    """The accuracies of the best epoch on held-out images, and the curves."""
    rows, best = epochs(run), run.summary.best_epoch
    names = {"best": "the best epoch", "last": "the last epoch"}
    metrics = list(dict.fromkeys(result.metric for result in run.summary.results))
    body = []
    for model in dict.fromkeys(result.model for result in run.summary.results):
        cells = [result_cell(run.find(model, metric)) for metric in metrics]
        counts = [result.n for result in run.summary.results if result.model == model]
        body.append([Cell(names.get(model, run.name(model))), *cells, Cell(format.counts(counts))])
    text = []
    for result in run.summary.results[:1]:
        text.append(
            f"{names.get(result.model, run.name(result.model)).capitalize()} classifies "
            f"{format.percent(result.value)} of n = {result.n} held-out images correctly ({result.metric})."
        )
    if best is not None and best >= 0 and body:
        text.append(
            f"The best of {len(rows)} epochs is epoch {best + 1}. It was selected on the held-out images, so its "
            "accuracy on them is optimistic; evaluate it on test images."
        )
    if not text:
        text.append(
            f"{len(rows)} epochs; no images were held out."
            if run.finished
            else f"{len(rows)} epochs so far."
        )
    head = ["weights", *(ACCURACIES.get(metric, (metric, ""))[0] for metric in metrics), "n"]
    tables = (
        [Table("Accuracy on held-out images, with 95 % intervals.", head, body)] if body else []
    )
    return Section("Verdict", text, [_accuracy_figure(run, rows)] if rows else [], tables)


def training(run: RunView) -> Section | None:
    """Loss, learning rate, and the numbers of every epoch."""
    rows = epochs(run)
    if not rows:
        return None
    figures = [_curve("loss", "Training loss of each epoch", "loss", [row.loss for row in rows])]
    figures.append(
        _curve(
            "rate",
            "Learning rate at the end of each epoch",
            "learning rate",
            [row.lr for row in rows],
        )
    )
    names = [name for name in ACCURACIES if any(name in accuracies(row) for row in rows)]
    body = []
    for row in rows:
        cells = [Cell(str(row.index + 1)), Cell(f"{row.loss:.4f}"), Cell(f"{row.lr:.4g}")]
        for name in names:
            value = accuracies(row).get(name)
            cells.append(MISSING if value is None else Cell(format.percent(value)))
        body.append([*cells, Cell(f"{row.images_per_second:.0f}")])
    head = [
        "epoch",
        "loss",
        "learning rate",
        *(ACCURACIES[name][0] for name in names),
        "images per second",
    ]
    table = Table("Every epoch.", head, body, collapsed=True)
    return Section("Training", figures=figures, tables=[table])


def _accuracy_figure(run: RunView, rows: Sequence[EpochRow]) -> Figure:
    n = run.summary.results[0].n if run.summary.results else 0
    records: Records = []
    for name, (label, _) in ACCURACIES.items():
        for row in rows:
            value = accuracies(row).get(name)
            if value is None:
                continue
            record = {"model": label, "x": row.index + 1, "y": round(value, 5)}
            if n and name != "accuracy":
                record |= charts.fields(stats.of_share(value, n), "y")
            records.append(record)
    return charts.curves(
        "training",
        f"Accuracy after each epoch{', with 95 % intervals on held-out images' if n else ''}",
        records,
        dict(ACCURACIES.values()),
        x="epoch",
        y="images classified correctly",
        dots=len(rows) < 30,
    )


def _curve(name: str, title: str, what: str, values: Sequence[float]) -> Figure:
    records: Records = []
    for epoch, value in enumerate(values, start=1):
        records.append({"model": what, "x": epoch, "y": round(value, 6)})
    return charts.curves(
        f"training-{name}",
        title,
        records,
        {what: "ink"},
        x="epoch",
        y=what,
        is_share=False,
        dots=len(values) < 30,
        height=180,
    )
