"""Finished run folders without a model: rows from a seeded generator, summarised as a real run
is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import aggregation, arrays
from equipoise.core.arrays import ExampleArrays
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.render import ordered
from equipoise.reporting.section import RunView, read_run

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
    """Titles of all sections of the report; every figure is drawn, but not rendered."""
    shown = [section for function in ordered() if (section := function(run)) is not None]
    with styled(LIGHT):
        for section in shown:
            for picture in section.pictures:
                picture.draw(LIGHT)
    return [section.title for section in shown]


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
    with_examples: bool = True,
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
    if with_examples:
        arrays.save(folder, examples(rng))
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


def examples(rng: np.random.Generator) -> ExampleArrays:
    """Five images of random ramps with changes of ±8."""
    shape = (5, 3, 12, 14)
    ramp = np.linspace(60, 190, shape[2] * shape[3]).reshape(shape[2:])
    clean = np.clip(
        ramp + rng.normal(0, 12, shape) + rng.normal(0, 40, (5, 3, 1, 1)), 0, 255
    ).astype(np.uint8)
    attacked = np.clip(clean + rng.choice([-8, 8], shape), 0, 255).astype(np.uint8)
    return ExampleArrays(
        clean=clean,
        attacked=attacked,
        label=np.array([0, 1, 2, 3, 0]),
        predicted=np.array([[1, 0, 0], [2, 1, 1], [0, 2, 2], [1, 0, 3], [3, 0, 1]]),
        class_names=("ship", "horse", "frog", "<b>truck</b>"),
    )
