"""What a section is made from: the run that it shows, and the prose, tables and pictures that it
returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.core import format, records, serialize
from equipoise.core.aggregation import CLEAN, accuracies
from equipoise.core.checks import InputError
from equipoise.core.results import Result, Summary, read_summary
from equipoise.core.rows import SEARCH, AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.reporting.charts import MODELS, Chart, Picture

INTERVALS = "Images classified correctly, with exact 95 % intervals"
SAME_NUMBERS = "The same numbers as a table"
MOST_COLUMNS_OF_A_PHONE = 4


@dataclass(frozen=True)
class RunView:
    """Everything a section may use; arrays are loaded from `folder` by those that need them."""

    folder: Path
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    summary: Summary
    rows: list[Row]
    finished: bool = True

    @property
    def attacks(self) -> list[str]:
        """Names of the attacks of the run, without `clean`."""
        return sorted({row.attack for row in self.rows if isinstance(row, AttackRow)} - {CLEAN})

    @property
    def data(self) -> Mapping[str, Any]:
        """The images of the run: name, split and count as far as they are known; of a demo, those
        evaluated on."""
        known = (source.get("data") for source in (self.identity, self.settings))
        return next((data for data in known if isinstance(data, Mapping)), {})

    @property
    def threat(self) -> Threat | None:
        """The threat model, if the run had one."""
        if given := self.identity.get("threat"):
            return serialize.from_plain(Threat, given, f"threat of {self.folder / 'run.toml'}")
        return next(
            (result.threat for result in self.summary.results if result.threat is not None), None
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """Short names of all models of the run, the same in every section; full ones where short
        ones are the same."""
        models = dict.fromkeys(
            [*(result.model for result in self.summary.results), *(row.model for row in self.rows)]
        )
        short = format.short_names(models)
        return (
            short
            if len(set(short.values())) == len(short)
            else {model: format.literal(model) for model in models}
        )

    def name(self, model: str) -> str:
        """The short name of a model."""
        return self.names.get(model) or format.short_names([model])[model]

    def find(self, model: str, metric: str) -> Result | None:
        """The result of a model and metric that belongs to no alpha of a sweep."""
        return next(
            (
                result
                for result in self.summary.results
                if (result.model, result.metric, result.alpha) == (model, metric, None)
            ),
            None,
        )

    def curve(self, model: str, metric: str) -> list[Result]:
        """The results of a model and metric at every alpha of a sweep, in order of alpha."""
        return sorted(
            (
                result
                for result in self.summary.results
                if (result.model, result.metric) == (model, metric) and result.alpha is not None
            ),
            key=lambda result: result.alpha or 0.0,
        )

    def subrun(self, name: str) -> RunView | None:
        """A finished run in a subfolder; None if there is none."""
        folder = self.folder / name
        return read_run(folder) if (folder / "summary.json").exists() else None


def read_run(folder: Path | str) -> RunView:
    """Open a run folder, of a fit without the rows of images that selected its map, which are
    optimistic.

    The summary of a run that is not finished is that of its rows so far.
    """
    return read_overview(folder, with_rows=True)


def read_overview(folder: Path | str, *, with_rows: bool = False) -> RunView:
    """Open a run folder; without the rows of a finished run it may have none, and needs little
    time."""
    folder = Path(folder)
    if not (folder / "run.toml").exists():
        got = (
            "one without run.toml"
            if folder.is_dir()
            else "a file"
            if folder.exists()
            else "no such folder"
        )
        raise InputError(f"{folder} must be a run folder, got {got}")
    described = records.read_description(
        folder / "run.toml"
    )  # names the version that wrote it, so it comes first
    identity, finished = described.identity, (folder / "summary.json").exists()
    summary, rows = read_summary(folder) if finished else None, list[Row]()
    if summary is None or with_rows:
        rows = records.read_rows(folder, identity)
    if summary is None:
        threat = (
            serialize.from_plain(Threat, identity["threat"], "threat")
            if "threat" in identity
            else None
        )
        summary = Summary(
            command=str(identity.get("command", "run")),
            seconds=0.0,
            results=tuple(accuracies(rows, threat)),
        )
    return RunView(
        folder,
        identity,
        described.settings,
        summary,
        [row for row in rows if getattr(row, "half", None) != SEARCH],
        finished,
    )


@dataclass(frozen=True)
class Cell:
    """A value, a note in small print below it, and the colour that marks it: a model, or a key of
    the palette.

    `link` is a relative address; `order` is what the cell is sorted by where that is not its text.
    """

    text: str
    note: str = ""
    model: str = ""
    link: str = ""
    order: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows below a head; the first cell of a row names it. Numbers are aligned right, or text left.

    A table with `filters`, some of its columns, is wide and can be sorted, searched, and filtered
    by these.
    """

    caption: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    is_text: bool = False
    collapsed: bool = False
    filters: Sequence[str] = ()

    @property
    def has_many_columns(self) -> bool:
        """Whether a phone has no room for them and shows each row as a card."""
        return not self.is_text and len(self.head) > MOST_COLUMNS_OF_A_PHONE


@dataclass(frozen=True)
class Explorer:
    """What the script of the report shows: packed columns, and sprites of pictures as data URIs
    with their sizes."""

    columns: str
    pictures: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A title, a few sentences with the main result first, and the pictures and tables that show
    it."""

    title: str
    prose: Sequence[str]
    tables: Sequence[Table] = ()
    pictures: Sequence[Chart | Picture] = ()
    code: str = ""
    explorer: Explorer | None = None
    leads: bool = False  # comes before all others


MISSING = Cell("–")


def model_cell(name: str, note: str = "") -> Cell:
    """The name of a model, with its colour if it is a base model or the mixture."""
    return Cell(name, note, name if name in MODELS else "")


def result_cell(result: Result, note: str = "") -> Cell:
    """The value of a result with its interval, and perhaps a note after it."""
    return Cell(format.value(result), format.bounds(result) + note)


def result_label(result: Result) -> str:
    """The model of a result, with its alpha in a sweep."""
    return format.label(result.model, result.alpha)


def result_table(
    caption: str,
    corner: str,
    results: Sequence[Result],
    *,
    row: Callable[[Result], str] = result_label,
    column: Callable[[Result], str] = lambda result: result.metric,
    columns: Iterable[str] | None = None,
    collapsed: bool = False,
) -> Table:
    """Results in a grid, each with its interval; the caption gets the number of images, or each
    cell if they differ.

    Args:
        caption, corner: the caption without a full stop, and the head of the first column.
        results: in the order of the rows, and of the columns if `columns` is not given.
        row, column: label of the row and of the column that a result belongs to.
        columns: labels of the columns to show; those without any result are left out.
        collapsed: hide the table until it is clicked on.
    """
    cells = {(row(result), column(result)): result for result in results}
    present = list(dict.fromkeys(name for _, name in cells))
    shown = present if columns is None else [name for name in columns if name in present]
    counts = {result.n for (_, name), result in cells.items() if name in shown}
    n = f"; n = {min(counts)} images" if len(counts) == 1 else ""
    body = [
        [
            model_cell(name),
            *(
                MISSING
                if (result := cells.get((name, column))) is None
                else result_cell(result, "" if n else f", n = {result.n}")
                for column in shown
            ),
        ]
        for name in dict.fromkeys(name for name, column in cells if column in shown)
    ]
    return Table(f"{caption}{n}.", [corner, *shown], body, collapsed=collapsed)
