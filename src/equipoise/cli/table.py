"""Results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from equipoise.core.records import Row
from equipoise.core.threat import Threat
from equipoise.reporting import numbers, style


def show(results: Sequence[Row], under: Threat | str) -> None:
    """One line per model, one column per metric, each with its 95 % interval; `under` ends the title."""
    chosen = [row for row in results if "alpha" not in row]
    metrics = sorted(dict.fromkeys(row["metric"] for row in chosen), key=lambda m: (m == "worst", m != "clean"))
    sizes = sorted({row["n"] for row in chosen})
    counted = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1),
                  title=f"Accuracy on {counted} images, 95 % intervals, {under}")
    shown.add_column("model", overflow="fold")
    for metric in metrics:
        # Broken where a reader would, so that six columns fit into a terminal of eighty.
        shown.add_column(metric.replace("-", "-\n"), justify="right")
    for model in dict.fromkeys(row["model"] for row in chosen):
        cells = {row["metric"]: f"{numbers.percent(row['value'])}\n{numbers.interval(row['low'], row['high'])}"
                 for row in chosen if row["model"] == model}
        shown.add_row(model, *(cells.get(metric, "") for metric in metrics))
    Console().print(shown)


def show_estimates(results: Sequence[Row], threat: Threat) -> None:
    """The local Lipschitz constant of every model, and the share of images that a mixture would keep per alpha."""
    at = {(row["model"], row["metric"]): row for row in results}
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"Estimates, not certificates, {threat}")
    shown.add_column("model", overflow="fold")
    for column in ("constant", "alpha", "kept by it", "kept at attacked images"):
        shown.add_column(column, justify="right")
    called, before = style.short(row["model"] for row in results), ""
    for (model, metric), row in at.items():
        if metric.startswith("kept@"):
            attacked = at.get((model, f"attacked-{metric}"))
            first = ["", ""] if model == before else [called[model], f"{at[model, 'lipschitz']['value']:.2f}"]
            shown.add_row(*first, metric.removeprefix("kept@"), numbers.percent(row["value"]),
                          numbers.percent(attacked["value"]) if attacked else "")
            before = model
    Console().print(shown)
