"""The rows of a comparison as small files, and the table that follows from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import equipoise as eq
from equipoise.core.comparison import ComparedMethod
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.studies import Comparison, comparison_table

THREAT = eq.Threat("linf", 0.004)


def exported(folder: Path, count: int, methods: int) -> Comparison:
    """A comparison of random rows, exported."""
    generator, names = (
        np.random.default_rng(0),
        [f"method {number}" for number in range(methods - 2)],
    )
    rows: list[Row] = []
    for model in ("accurate", "robust", *names):
        for index in range(count):
            label, predicted = (
                index % 10,
                int(generator.integers(10)) if generator.random() < 0.15 else index % 10,
            )
            survives = label == predicted and generator.random() < 0.5
            clean = AttackRow(
                index=index,
                model=model,
                attack="clean",
                label=label,
                predicted=predicted,
                correct=label == predicted,
            )
            rows += [
                clean,
                replace(
                    clean,
                    attack="attacked",
                    predicted=None,
                    correct=survives,
                    broken_by=None if survives else "adaptive/apgd-dlr",
                ),
            ]
    listed = [eq_method(name) for name in ("accurate", "robust", *names)]
    result = Comparison(
        Summary(
            command="compare-rules", seconds=0, **comparison_table.summarize(rows, listed, THREAT)
        ),
        rows,
        None,
        THREAT,
    )
    result.export(folder)
    return result


def eq_method(name: str) -> ComparedMethod:
    return ComparedMethod(name=name, family=name, mixture="alpha 0.9", measured_as=name)


def test_exported_rows_are_small_and_give_the_same_table(tmp_path: Path) -> None:
    result = exported(tmp_path, 1000, 16)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300_000
    assert comparison_table.markdown(comparison_table.read_export(tmp_path)) == result.markdown()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result.export(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
