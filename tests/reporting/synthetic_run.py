"""Finished run folders without a model: rows from a seeded generator, summarised as a real run
is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import aggregation
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.reporting.run_view import RunView, read_run
from equipoise.reporting.section import Cell, Figure, Section, Table
from equipoise.reporting.sections import sections_of

THREAT = Threat("linf", 8 / 255)
ACCURACIES = {
    "accurate": (0.96, 0.02),
    "robust": (0.85, 0.66),
    "mixed": (0.94, 0.62),
}  # clean, attacked
PAIRS = [("mixed", "accurate"), ("mixed", "robust")]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def write_run(
    folder: Path,
    summary: Summary,
    rows: Sequence[Row] = (),
    identity: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> RunView:
    """Write a finished run folder and open it."""
    run = Run(folder, identity or {"command": summary.command}, settings or {})
    run.append(rows)
    run.finish()
    run.write_summary(summary)
    return read_run(folder)


def section_titles(run: RunView) -> list[str]:
    """Titles of all sections of the report."""
    return [section.title for section in sections_of(run)]


def shown(section: Section | None) -> Section:
    """A section that is there."""
    assert section is not None
    return section


def figure(section: Section | None, name: str) -> Figure:
    """A figure of a section by the name of its files."""
    (found,) = [own for own in shown(section).figures if own.name == name]
    return found


def values(figure: Figure, model: str, *fields: str, **wanted: object) -> list[tuple[Any, ...]]:
    """What a figure draws of a model."""
    records = [record for record in figure.records if record["model"] == model]
    for key, value in wanted.items():
        records = [record for record in records if record[key] == value]
    return [tuple(record[field] for field in fields) for record in records]


def texts(table: Table) -> list[list[str]]:
    """The cells of a table, each with its note after it."""
    return [[_text(cell) for cell in row] for row in table.rows]


def _text(cell: Cell) -> str:
    return f"{cell.text} {cell.note}".strip()


def result(
    model: str,
    metric: str,
    value: float,
    *,
    alpha: float | None = None,
    half_width: float = 0.02,
    n: int = 50,
    **more: Any,
) -> Result:
    """A result with a symmetric interval."""
    return Result(
        model=model,
        metric=metric,
        value=value,
        low=value - half_width,
        high=value + half_width,
        n=n,
        alpha=alpha,
        **more,
    )


def make(
    folder: Path,
    *,
    n: int = 200,
    with_sweep: bool = True,
    names: dict[str, str] | None = None,
    attacks: tuple[str, ...] = ("pgd", "apgd"),
    command: str = "equipoise evaluate mixture:m",
    **more: Any,
) -> Path:
    """A finished run of the three models; `names` renames some, `more` are further fields of the
    summary."""
    rng = np.random.default_rng(7)
    names = names or {}
    rows = [
        row
        for model, shares in ACCURACIES.items()
        for row in _rows(rng, names.get(model, model), n, shares, attacks)
    ]
    pairs = [(names.get(a, a), names.get(b, b)) for a, b in PAIRS]
    _evaluate(folder, rows, pairs, {"device": "cpu", "command": command}, **more)
    if with_sweep:
        swept = [
            row
            for alpha in ALPHAS
            for row in _rows(
                rng, "mixed", n // 2, (0.96 - 0.1 * alpha**4, 0.02 + 0.64 * alpha), ("pgd",), alpha
            )
        ]
        _evaluate(folder / "sweep", swept, [], {})
    return folder


def _rows(
    rng: np.random.Generator,
    model: str,
    n: int,
    shares: tuple[float, float],
    attacks: tuple[str, ...],
    alpha: float | None = None,
) -> list[Row]:
    difficulty = rng.random(n)
    rows: list[Row] = []
    for attack in ("clean", *attacks):
        margin = np.tanh(
            3.0 * (shares[attack != "clean"] - difficulty) + 0.05 * rng.standard_normal(n)
        )
        rows += [
            AttackRow(
                index=i,
                model=model,
                attack=attack,
                label=0,
                predicted=int(margin[i] <= 0),
                alpha=alpha,
                correct=bool(margin[i] > 0),
                margin=round(float(margin[i]), 6),
            )
            for i in range(n)
        ]
    return rows


def _evaluate(
    folder: Path,
    rows: list[Row],
    pairs: list[tuple[str, str]],
    settings: dict[str, Any],
    **more: Any,
) -> None:
    summary = Summary(
        command="evaluate",
        seconds=1.5,
        results=tuple(aggregation.accuracies(rows, THREAT)),
        differences=tuple(aggregation.differences(rows, pairs, THREAT)),
        **more,
    )
    write_run(
        folder,
        summary,
        rows,
        {
            "command": "evaluate",
            "seed": 0,
            "data": {"name": "synthetic", "count": 200},
            "threat": THREAT.to_dict(),
        },
        settings,
    )
