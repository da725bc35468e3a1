"""The engine of today against the frozen verdicts of another one: see README.md."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from frozen_cells import (
    DATA,
    GPU_RUNS,
    RUNS,
    STORED_WEIGHTS,
    VERDICTS,
    Run,
    Verdicts,
    evaluate,
    lay_out,
)

import equipoise as eq

RESTARTS, STEPS = 10, 50  # of the independent attack on images whose verdicts differ

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
    lay_out(tmp_path)
    data = eq.load_data(DATA[run.pair], count=run.count)
    found = evaluate(run, data, tmp_path, tmp_path / "run")
    failures = []
    for model in run.models:
        frozen = Verdicts.read(VERDICTS / f"{run.cell(model)}.json")
        lines, within = compare(run, model, frozen, found[model], data, tmp_path)
        print("\n".join(lines))
        if not within:
            failures += lines
    assert not failures, "\n".join(failures)


def test_every_cell_has_its_file_and_every_file_its_cell() -> None:
    cells = {
        f"{run.cell(model)}.json": run.count for run in (*RUNS, *GPU_RUNS) for model in run.models
    }
    assert cells == {path.name: len(Verdicts.read(path).index) for path in VERDICTS.iterdir()}


@pytest.mark.slow
def test_an_attack_of_one_step_is_noticed(tmp_path: Path) -> None:
    run = next(run for run in RUNS if str(run) == "digits-l1-pgd-plain")
    lay_out(tmp_path)
    data = eq.load_data("digits", count=run.count)
    frozen = Verdicts.read(VERDICTS / f"{run.cell('plain')}.json")
    weakened = evaluate(run, data, tmp_path, tmp_path / "run", steps=1)["plain"]
    lines, within = compare(run, "plain", frozen, weakened, data, tmp_path)
    assert not within
    assert any("now it survives" in line and "restarts of PGD break it" in line for line in lines)


def test_a_larger_radius_is_noticed(tmp_path: Path) -> None:
    run = next(run for run in RUNS if str(run) == "digits-l1-minimum-norm-accurate")
    frozen = Verdicts.read(VERDICTS / f"{run}.json")
    assert frozen.radius is not None
    grown = [None if radius is None else 2 * radius for radius in frozen.radius]
    found = dataclasses.replace(frozen, radius=grown)
    lines, within = compare(
        run, "accurate", frozen, found, eq.load_data("digits", count=run.count), tmp_path
    )
    assert not within
    assert any("radius" in line for line in lines)


def _require_what_it_needs(run: Run) -> None:
    if run.pair in STORED_WEIGHTS:
        for variable in ("EQUIPOISE_DATA", "EQUIPOISE_WEIGHTS"):
            if not os.environ.get(variable):
                pytest.skip(f"{run} needs ${variable}")
    if run.device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{run} needs a CUDA device")


def compare(
    run: Run, model: str, frozen: Verdicts, found: Verdicts, data: eq.Dataset, root: Path
) -> tuple[list[str], bool]:
    """What differs in a cell, in a line per image and one for the cell, and whether the table allows it."""
    assert found.index == frozen.index, "other images"
    assert found.label == frozen.label, "other labels"
    rows = range(len(frozen.index))
    differing = [row for row in rows if found.survives[row] != frozen.survives[row]]
    larger = _larger_radii(run, frozen, found)
    lines = [_difference(frozen, found, row) for row in differing]
    if differing:
        for number, verdict in enumerate(_attack_again(run, model, data, differing, root)):
            lines[number] += verdict
    lines += larger
    before, after = sum(frozen.survives), sum(found.survives)
    lines.append(
        f"{run.cell(model)}: {after} of {len(rows)} survive, frozen {before} (at most {run.more} more); "
        f"{len(differing)} differ (at most {run.differ}); {len(larger)} radii grew"
    )
    return lines, len(differing) <= run.differ and after <= before + run.more and not larger


def _difference(frozen: Verdicts, found: Verdicts, row: int) -> str:
    return f"image {frozen.index[row]} ({_story(frozen, row)}); now it {_story(found, row)}: "


def _story(verdicts: Verdicts, row: int) -> str:
    stage = verdicts.broken_by[row]
    margin = f"margin {verdicts.margin[row]:.4f}"
    if stage is None:
        return f"survives, {margin}"
    return f"is taken for class {verdicts.predicted[row]} by {verdicts.stages[stage]}, {margin}"


def _attack_again(run: Run, model: str, data: eq.Dataset, rows: list[int], root: Path) -> list[str]:
    """What an independent attack makes of these images: PGD with other random numbers and many restarts."""
    few = data.take(torch.tensor(rows))
    alone = dataclasses.replace(run, model=model, attack="pgd", settings={})
    out = root / f"again-{model}"
    verdicts = evaluate(alone, few, root, out, steps=STEPS, restarts=RESTARTS, seed=1)[model]
    does = {0: "break", 1: "do not break"}
    return [f"{RESTARTS} restarts of PGD {does[survives]} it" for survives in verdicts.survives]


def _larger_radii(run: Run, frozen: Verdicts, found: Verdicts) -> list[str]:
    """The images whose smallest perturbation is larger than it was by more than the factor of the run."""
    if frozen.radius is None:
        return []
    assert found.radius is not None, "the rows of minimum-norm must hold radii"
    lines = []
    for index, old, new in zip(frozen.index, frozen.radius, found.radius, strict=True):
        if old is not None and new is not None and new > run.radius_factor * old + 1e-6:
            lines.append(
                f"image {index}: radius {new:.5f}, frozen {old:.5f}, more than {run.radius_factor:g} times"
            )
    return lines
