"""Results of a comparison of mixing rules: the table, and the rows of all methods as small
compressed files."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise import models
from equipoise.core import aggregation, checks, config, files, format, serialize
from equipoise.core.aggregation import CLEAN, ROBUST, ComparedLine, compared_lines
from equipoise.core.comparison import ComparedMethod
from equipoise.core.results import Result, Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.evaluation.evaluator import RunResults
from equipoise.mixing import CascadedClassifier, GatedClassifier, MixedClassifier
from equipoise.studies.attack_list import ATTACKED

ROWS, METHODS = "rows.csv.gz", "methods.json"
COLUMNS = (
    "method",
    "index",
    "label",
    "clean_prediction",
    "clean_correct",
    "attacked_correct",
    "broken_by",
)
MAX_BYTES = 1 << 28  # of the uncompressed rows of an export


def summarize(
    rows: Iterable[Row], methods: Sequence[ComparedMethod], threat: Threat
) -> dict[str, Any]:
    """Fields of the summary: accuracies, and differences from the robust model image by image."""
    rows = list(rows)
    pairs = [
        (name, ROBUST)
        for name in dict.fromkeys(method.measured_as for method in methods)
        if name != ROBUST
    ]
    return {
        "results": tuple(aggregation.accuracies(rows, threat)),
        "compared": tuple(methods),
        "differences": tuple(aggregation.differences(rows, pairs, threat)),
    }


def means(shown: Sequence[ComparedLine]) -> list[tuple[str, list[ComparedLine]]]:
    """The families with several members, such as gates of several random seeds; equal mixtures are
    one."""
    families: dict[str, list[ComparedLine]] = {}
    for line in shown:
        if line.method.name == line.method.measured_as:
            families.setdefault(line.method.family, []).append(line)
    return [(family, own) for family, own in families.items() if len(own) > 1]


def table(summary: Summary, under: str) -> str:
    """The comparison as text, with 95 % intervals; `under` ends the title."""
    shown = compared_lines(summary)
    count = format.counts(line.clean.n for line in shown)
    grid = format.new_table(
        f"Rules on {count} images, 95 % intervals, {under}",
        "method",
        "map, alpha",
        CLEAN,
        "attacked",
        "points lost",
    )
    for line in shown:
        lost = (
            "" if line.lost is None else f"{_points(line.lost.value)}\n{format.bounds(line.lost)}"
        )
        grid.add_row(
            line.method.name, line.method.description, _cell(line.clean), _cell(line.attacked), lost
        )
    for family, own in means(shown):
        grid.add_row(f"{family},\nmean of {len(own)}", "", *_mean_cells(own))
    by_promise: dict[str, list[str]] = {}
    for method in summary.compared:
        by_promise.setdefault(method.promise, []).append(method.name)
    notes = [f"{', '.join(names)}: {promise}" for promise, names in by_promise.items() if promise]
    return "\n".join([format.render(grid), *notes, *format.notes(summary)])


def markdown(summary: Summary) -> str:
    """The comparison as a table in Markdown."""
    text = [
        "| method | map, α | clean, % | attacked, % | points lost to the robust model |",
        "|---|---|---|---|---|",
    ]
    shown = compared_lines(summary)
    for line in shown:
        lost = "" if line.lost is None else f"{_points(line.lost.value)} {format.bounds(line.lost)}"
        text.append(
            f"| {line.method.name} | {line.method.description} | {_cell(line.clean, ' ')} | "
            f"{_cell(line.attacked, ' ')} | {lost} |"
        )
    text += [
        f"| **{family}, mean of {len(own)} (least to most)** | | "
        + " | ".join(cell.replace("\n", " ") for cell in _mean_cells(own))
        + " |"
        for family, own in means(shown)
    ]
    return "\n".join(text)


def _cell(result: Result, between: str = "\n") -> str:
    return f"{format.number(100 * result.value, 1)}{between}{format.bounds(result)}"


def _points(value: float) -> str:
    return format.number(100 * value, 1)


def _mean_cells(own: Sequence[ComparedLine]) -> list[str]:
    """Mean, least and most of the clean and attacked accuracies and the points lost."""
    columns = [
        [line.clean.value for line in own],
        [line.attacked.value for line in own],
        [line.lost.value for line in own if line.lost is not None],
    ]
    return [
        f"{_points(sum(values) / len(values))}\n({_points(min(values))} to {_points(max(values))})"
        if values
        else ""
        for values in columns
    ]


@dataclass(frozen=True)
class Comparison(RunResults):
    """Several rules for mixing one pair, evaluated on the same images; `str()` is the table of the
    command."""

    threat: Threat

    def __str__(self) -> str:
        return table(self.summary, str(self.threat))

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown(self.summary)

    def export(self, folder: Path | str, **description: Any) -> None:
        """Write :data:`ROWS`, a row per method and image, and :data:`METHODS`; :func:`read_export`
        reads them.

        `description` is kept in :data:`METHODS`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(
            _export_rows(self.rows, [method.measured_as for method in self.summary.compared])
        )
        files.write_atomic(folder / ROWS, gzip.compress(buffer.getvalue().encode(), mtime=0))
        content = {
            "threat": self.threat.to_dict(),
            "methods": serialize.to_plain(self.summary.compared),
            **description,
        }
        files.write_atomic(folder / METHODS, json.dumps(content, indent=1) + "\n")


def _export_rows(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """One row per model and image, in the order of the methods."""
    measured = {row.key[:3]: row for row in rows if isinstance(row, AttackRow)}
    clean = [row for row in measured.values() if row.attack == CLEAN]
    models = list(dict.fromkeys(names))
    exported = []
    for row in sorted(clean, key=lambda row: (models.index(row.model), row.index)):
        attacked = measured[row.index, row.model, ATTACKED]
        exported.append(
            (
                row.model,
                row.index,
                row.label,
                row.predicted,
                int(row.correct),
                int(attacked.correct),
                attacked.broken_by or "",
            )
        )
    return exported


def read_export(folder: Path | str) -> Summary:
    """The summary of a comparison, computed again from its exported rows."""
    folder = Path(folder)
    described = config.read_json(folder / METHODS)
    methods = tuple(
        serialize.from_plain(ComparedMethod, item, str(folder / METHODS))
        for item in described["methods"]
    )
    threat = serialize.from_plain(Threat, described["threat"], str(folder / METHODS))
    with gzip.open(folder / ROWS, "rt", encoding="utf-8", newline="") as file:
        content = file.read(MAX_BYTES)
    table = list(csv.reader(io.StringIO(content, newline="")))
    checks.require(
        bool(table) and tuple(table[0]) == COLUMNS,
        str(folder / ROWS),
        f"have the columns {', '.join(COLUMNS)}",
        table[:1],
    )
    rows: list[Row] = []
    for method, index, label, predicted, correct, attacked, broken_by in table[1:]:
        clean = AttackRow(
            index=int(index),
            model=method,
            attack=CLEAN,
            label=int(label),
            predicted=int(predicted),
            correct=correct == "1",
        )
        checks.require(
            clean.correct == (clean.predicted == clean.label),
            str(folder / ROWS),
            "say whether label and prediction are equal",
            f"{method}, image {index}",
        )
        rows += [
            clean,
            replace(
                clean,
                attack=ATTACKED,
                predicted=None,
                correct=attacked == "1",
                broken_by=broken_by or None,
            ),
        ]
    return Summary(command="compare-rules", seconds=0.0, **summarize(rows, methods, threat))


def read_threat(folder: Path | str) -> Threat:
    """The threat of an export."""
    path = Path(folder) / METHODS
    return serialize.from_plain(Threat, config.read_json(path)["threat"], str(path))


def measured_as(mixtures: Mapping[str, MixedClassifier]) -> dict[str, str]:
    """What each mixture is measured as: the first mixture equal to it, or the robust model if it is
    that alone."""
    first: dict[str, str] = {}  # identity → name
    return {
        name: ROBUST
        if mixture.alpha == 1 and mixture.logit_map is None
        else first.setdefault(json.dumps(models.identity(mixture), sort_keys=True), name)
        for name, mixture in mixtures.items()
    }


def describe(mixture: MixedClassifier) -> str:
    """The map and alpha, numbers to three digits."""
    numbers = []
    if mixture.logit_map is not None:
        own = mixture.logit_map.settings
        form = [
            own.clamp,
            *([] if own.rivals in (0, 1) else [f"rivals {own.rivals:.3g}"]),
            *([] if own.unit is None else [f"unit {own.unit:.3g}"]),
        ]
        numbers = [
            *(["switch"] if own.rivals == 0 else []),
            *form,
            *(
                f"{name} {value:.3g}"
                for name, value in (("s", own.scale), ("p", own.power), ("c", own.shift))
            ),
        ]
        if isinstance(mixture, CascadedClassifier):
            scale = own.scale if mixture.first_scale is None else mixture.first_scale
            numbers.append(f"first view s {scale:.3g} q {mixture.first_q:.3g}")
    low, high = (
        mixture.alpha_range if isinstance(mixture, GatedClassifier) else (mixture.alpha, None)
    )
    return ", ".join(
        [*numbers, f"alpha {low:.3g}" if high is None else f"alpha {low:.3g} to {high:.3g}"]
    )
