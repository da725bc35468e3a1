"""The engine of today against the frozen verdicts of another one: see README.md."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from frozen_cells import GPU_RUNS, RUNS, STORED_WEIGHTS, VERDICTS, Run, Verdicts
from frozen_comparison import compare, compare_run

# Of few images the class shares differ from those of the set, of which an evaluation warns.
pytestmark = pytest.mark.filterwarnings("ignore::equipoise.core.checks.EquipoiseWarning")


def _marked(run: Run) -> object:
    marks = [pytest.mark.slow]
    if run.pair in STORED_WEIGHTS:
        marks.append(pytest.mark.reference)
    if run.device == "cuda":
        marks.append(pytest.mark.gpu)
    return pytest.param(run, id=str(run), marks=marks)


@pytest.mark.parametrize("run", [_marked(run) for run in (*RUNS, *GPU_RUNS)])
def test_verdicts_are_those_that_were_frozen(run: Run, tmp_path: Path) -> None:
    _require_what_it_needs(run)
    comparisons = compare_run(run, tmp_path)
    print(*comparisons, sep="\n")
    failed = [str(comparison) for comparison in comparisons if not comparison.allowed]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_an_attack_of_one_step_is_noticed(tmp_path: Path) -> None:
    run = _run("digits-l1-pgd-plain")
    (comparison,) = compare_run(run, tmp_path, steps=1)
    assert not comparison.allowed
    assert "now it survives" in str(comparison)
    assert "restarts of PGD break it" in str(comparison)


def test_a_larger_radius_is_noticed() -> None:
    run = _run("digits-l1-minimum-norm-accurate")
    frozen = Verdicts.read(VERDICTS / f"{run}.json")
    assert frozen.radius is not None
    grown = [None if radius is None else 2 * radius for radius in frozen.radius]
    found = dataclasses.replace(frozen, radius=grown)
    assert compare(run, "accurate", frozen, frozen, []).allowed
    assert not compare(run, "accurate", frozen, found, []).allowed


def test_larger_margins_of_survivors_are_noticed() -> None:
    run = _run("shapes-l1-pgd-robust")
    frozen = Verdicts.read(VERDICTS / f"{run}.json")
    found = dataclasses.replace(frozen, margin=[margin + 0.1 for margin in frozen.margin])
    assert not compare(run, "robust", frozen, found, []).allowed


def test_every_cell_has_its_file_and_every_file_its_cell() -> None:
    cells = {
        f"{run.cell(model)}.json": run.count for run in (*RUNS, *GPU_RUNS) for model in run.models
    }
    assert cells == {path.name: len(Verdicts.read(path).index) for path in VERDICTS.iterdir()}


def _run(name: str) -> Run:
    return next(run for run in RUNS if str(run) == name)


def _require_what_it_needs(run: Run) -> None:
    if run.pair in STORED_WEIGHTS:
        for variable in ("EQUIPOISE_DATA", "EQUIPOISE_WEIGHTS"):
            if not os.environ.get(variable):
                pytest.skip(f"{run} needs ${variable}")
    if run.device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{run} needs a CUDA device")
