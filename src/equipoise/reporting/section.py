"""What a section of a page is made of: sentences, figures, tables and a gallery of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Result
from equipoise.core.rows import Mixture
from equipoise.reporting.run_view import RunView

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A value with a note in small print below it.

    `colour` is the name of a colour of the palette, which marks a model or a run; `link` a relative
    address; `order` what the cell is sorted by where that is not its text.
    """

    text: str
    note: str = ""
    colour: str = ""
    link: str = ""
    order: float | None = None


MISSING = Cell("–")


def cells(*values: Cell | str) -> list[Cell]:
    """A row of a table."""
    return [Cell(value) if isinstance(value, str) else value for value in values]


@dataclass(frozen=True)
class Table:
    """Rows below a head; the first cell of a row names it.

    Numbers stand to the right, or everything to the left with `is_text`. A table that is `sortable`
    can also be searched.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_text: bool = False
    collapsed: bool = False
    sortable: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart: the name of its files, what it shows, and its Vega-Lite specification.

    The numbers that it is drawn from are the data set `records` of the specification.
    """

    name: str
    title: str
    specification: Mapping[str, Any]

    @property
    def records(self) -> Records:
        """The numbers that the figure is drawn from."""
        records: Records = self.specification["datasets"]["records"]
        return records


@dataclass(frozen=True)
class Section:
    """One question about a run and its answer.

    `alarms` are pairs of what was found and what it means for the claim; `gallery` is what the
    script of the page shows of images (see :mod:`equipoise.reporting.gallery`).
    """

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    alarms: Sequence[tuple[str, str]] = ()
    gallery: Mapping[str, Any] | None = None
    code: str = ""

    @property
    def is_split(self) -> bool:
        """Whether text and tables fit beside the only figure."""
        columns = [len(table.head) for table in self.tables if not table.is_text]
        return len(self.figures) == 1 and max(columns, default=0) <= 5


METRICS = {
    CLEAN: "clean accuracy",
    WORST: "robust accuracy",
    "acr": "average radius",
    "clean-estimate": "clean accuracy, estimated",
    "samples": "noisy samples",
    "certified": "certified accuracy",
    "true": "votes of the true class",
    "off": "votes of the best other class",
    "ratio": "mixing ratio",
    "abstained": "abstained",
}


def metric_name(metric: str) -> str:
    """A metric in words; any other is the name of an attack."""
    name, at, radius = metric.partition("@")
    if name not in METRICS:
        return f"under {format.literal(metric)}"
    return f"{METRICS[name]} at {radius}" if at else METRICS[name]


def metric_names(metrics: Iterable[str]) -> list[str]:
    """Metrics in words."""
    return [metric_name(metric) for metric in metrics]


def result_cell(result: Result | None) -> Cell:
    """The value of a result with its interval."""
    if result is None:
        return MISSING
    return Cell(format.value(result), format.bounds(result), order=result.value)


def result_table(
    run: RunView,
    caption: str,
    mixtures: Iterable[Mixture],
    metrics: Sequence[str],
    *,
    collapsed: bool = False,
) -> Table:
    """A row for each model, a column for each metric, and the number of images."""
    rows = []
    for model, alpha in mixtures:
        name = run.name(model, alpha)
        row, counts = [Cell(name, colour=run.colours.get(name, ""))], set()
        for metric in metrics:
            result = run.find(model, metric, alpha)
            row.append(result_cell(result))
            if result is not None:
                counts.add(result.n)
        if counts:
            rows.append([*row, Cell(format.counts(counts))])
    head = ["model", *metric_names(metrics), "n"]
    return Table(caption, head, rows, collapsed=collapsed)
