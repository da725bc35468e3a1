"""Results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from equipoise.records import Row
from equipoise.report import numbers
from equipoise.threat import Threat


def show(results: Sequence[Row], threat: Threat) -> None:
    """One line per model, one column per metric, each with its 95 % interval."""
    chosen = [row for row in results if "alpha" not in row]
    metrics = sorted(dict.fromkeys(row["metric"] for row in chosen), key=lambda m: (m == "worst", m != "clean"))
    sizes = sorted({row["n"] for row in chosen})
    counted = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"Accuracy on {counted} images, 95 % intervals, {threat}")
    shown.add_column("model", overflow="fold")
    for metric in metrics:
        shown.add_column(metric, justify="right")
    for model in dict.fromkeys(row["model"] for row in chosen):
        cells = {row["metric"]: f"{numbers.percent(row['value'])}\n{numbers.interval(row['low'], row['high'])}"
                 for row in chosen if row["model"] == model}
        shown.add_row(model, *(cells.get(metric, "") for metric in metrics))
    Console().print(shown)
