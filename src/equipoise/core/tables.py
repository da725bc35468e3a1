"""Tables of results as plain text, for the terminal and for `print(result)`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80


def new_table(title: str, first: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), title=title)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def render(table: Table) -> str:
    """The table as text without colours, under its title."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    title, table.title = table.title, None  # a title inside the table would wrap at the width of the table
    console.print(title, table, sep="\n")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def accuracy_table(results: Sequence[Result], under: str) -> str:
    """One line per model, one column per metric, each with its 95 % interval; `under` ends the title."""
    shown = [result for result in results if result.alpha is None]
    metrics = sorted(dict.fromkeys(result.metric for result in shown), key=lambda m: (m == WORST, m != CLEAN))
    count = format.counts(result.n for result in shown)
    # Attack names break at hyphens, so that six columns fit into a terminal of eighty.
    table = new_table(f"Accuracy on {count} images, 95 % intervals, {under}", "model",
                      *(metric.replace("-", "-\n") for metric in metrics))
    for model in dict.fromkeys(result.model for result in shown):
        cells = {result.metric: f"{format.value(result)}\n{format.bounds(result)}" for result in shown
                 if result.model == model}
        table.add_row(model, *(cells.get(metric, "") for metric in metrics))
    return render(table)
