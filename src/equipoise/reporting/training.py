"""The course of a training: loss, and accuracy on the training and the held-out images, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.core.records import Row
from equipoise.reporting import numbers, style
from equipoise.reporting.section import Cell, Picture, Section, Table
from equipoise.reporting.style import Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALLED = {"accuracy": "training, as trained on", "clean": "held out, clean", "attacked": "held out, under PGD",
          "noisy": "held out, under noise"}


def training(view: RunView) -> Section | None:
    """Curves of a run of `equipoise train`."""
    rows = [row for row in view.rows if row["attack"] == "epoch" and "loss" in row]
    if not rows:
        return None
    n = next((row["n"] for row in view.results), 0)
    best = view.summary.get("epoch")
    prose = ["Accuracy on the training images is that of the passing weights on what the objective trains on; held-out "
             f"images (n = {n}) are never trained on and are judged by the weights that are kept."]
    if isinstance(best, int) and best >= 0 and n:
        prose.append(f"The best epoch by the held-out images is {best + 1} of {len(rows)}; it was chosen on them, so "
                     "its accuracy there is flattering. Judge it on test images.")
    alt = f"Loss and accuracy over {len(rows)} epochs of training"
    return Section("Training", prose, [_table(rows)], [Picture("training", alt, lambda palette: draw(palette, rows))])


def draw(palette: Palette, rows: list[Row]) -> Figure:
    """Loss above, accuracies below, on one axis of epochs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(style.WIDTH, 4.4))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.5))
    epochs = [row["index"] + 1 for row in rows]
    above.plot(epochs, [row["loss"] for row in rows], color=palette.ink, marker=_dot(rows))
    above.set(ylabel="loss")
    colours = {"accuracy": palette.muted, "clean": palette.accurate, "attacked": palette.robust, "noisy": palette.mixed}
    for name, colour in colours.items():
        points = [(row["index"] + 1, 100 * row[name]) for row in rows if name in row]
        if points:
            below.plot(*zip(*points, strict=True), "--" if name == "accuracy" else "-", color=colour,
                       marker=_dot(points), label=CALLED[name])
    below.set(xlabel="epoch", ylabel="answered rightly, %")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3, labelcolor=palette.ink)
    return figure


def _dot(points: Sequence[object]) -> str:
    return "o" if len(points) < 30 else ""


def _table(rows: list[Row]) -> Table:
    held = [name for name in ("clean", "attacked", "noisy") if any(name in row for row in rows)]
    body = [[Cell(str(row["index"] + 1)), Cell(f"{row['loss']:.4f}"), Cell(f"{row['lr']:.4g}"),
             *(Cell(numbers.percent(row[name])) if name in row else Cell("–") for name in ("accuracy", *held)),
             Cell(f"{row['images_per_second']:.0f}")] for row in rows]
    head = ["epoch", "loss", "learning rate", *(CALLED[name] for name in ("accuracy", *held)), "images per second"]
    return Table("The same numbers as a table.", head, body, folded=True)
