"""The loop that turns images into rows: resuming, sharding, memory, extra columns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from killed_runs import KilledError, run_until_killed
from small_models import CONDITIONS, SmallNet, linear_model, random_images
from torch import Tensor, nn

from equipoise.attacks import Apgd, Attack, BatchAttack, Fab, Pgd, Square, Suite, TargetedApgd
from equipoise.core import parallel, records
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.rng import Stream
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job, measure

SUITE = Suite(
    attacks=(
        Apgd(loss="margin", steps=9),
        TargetedApgd(steps=12, ranks=(1, 2)),
        Fab(steps=10, ranks=(1,)),
        Square(queries=60),
    )
)
SUITE_CONDITIONS = replace(CONDITIONS, threat=Threat("linf", 0.02), batch_size=16)


@dataclass(frozen=True, kw_only=True)
class CountedPgd(BatchAttack):
    """PGD that records the sizes of its batches, and may fail."""

    name: ClassVar[str] = "counted"
    sizes: list[int] = field(default_factory=list)
    fail_at: int | None = None
    most: int | None = None

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        self.sizes.append(len(x))
        if len(self.sizes) == self.fail_at:
            raise KilledError
        if self.most is not None and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Pgd(steps=3)(model, x, y, threat=threat, stream=stream)


def run_pgd(
    folder: Path, attack: Attack | None = None, conditions: Conditions = CONDITIONS
) -> list[Row]:
    run = Run(folder, {"command": "test"}, {})
    measure(
        Job("m", linear_model(), "pgd", attack or Pgd(steps=3)), random_images(), run, conditions
    )
    return run.finish()


def suite_data() -> Dataset:
    return random_images(37, labels_of=SmallNet())


def run_suite(folder: Path, conditions: Conditions = SUITE_CONDITIONS) -> list[AttackRow]:
    run = Run(folder, {"command": "test"}, {})
    measure(Job("m", SmallNet().eval(), "mine", SUITE), suite_data(), run, conditions)
    return [row for row in run.finish() if isinstance(row, AttackRow)]


def test_every_image_has_a_row_of_the_model_s_own_prediction(tmp_path: Path) -> None:
    rows = run_pgd(tmp_path / "run")
    assert [row.index for row in rows] == list(range(50, 61))
    for row in rows:
        assert isinstance(row, AttackRow) and row.margin is not None
        assert row.correct == (row.predicted == row.label) == (row.margin > 0)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_killed_run_resumes_to_the_same_rows(tmp_path: Path, fail_at: int) -> None:
    complete = run_pgd(tmp_path / "complete")
    killed, resumed = CountedPgd(fail_at=fail_at), CountedPgd()
    with pytest.raises(KilledError):
        run_pgd(tmp_path / "run", killed)
    assert run_pgd(tmp_path / "run", resumed) == complete
    assert len(resumed.sizes) == 3 - (fail_at - 1), "finished batches are not repeated"
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == (
        tmp_path / "complete" / "rows.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_the_batch_size_does_not_change_the_rows(tmp_path: Path, batch_size: int) -> None:
    other = run_pgd(tmp_path / "other", conditions=replace(CONDITIONS, batch_size=batch_size))
    assert other == run_pgd(tmp_path / "run")


def test_out_of_memory_halves_the_batch(tmp_path: Path) -> None:
    greedy = CountedPgd(most=2)
    assert run_pgd(tmp_path / "run", greedy) == run_pgd(tmp_path / "complete")
    assert max(greedy.sizes) == 4 and sum(size for size in greedy.sizes if size <= 2) == 11


@dataclass(frozen=True, kw_only=True)
class LeavesTheBall(BatchAttack):
    """An attack that ignores the threat."""

    name: ClassVar[str] = "outside"

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        return 1 - x


def test_an_attack_that_leaves_the_ball_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`outside` must stay within"):
        run_pgd(tmp_path / "run", LeavesTheBall())


def test_rows_of_a_suite_name_the_stage_that_broke_the_image(tmp_path: Path) -> None:
    rows = run_suite(tmp_path / "run")
    assert [row.index for row in rows] == list(range(50, 87))
    for row in rows:
        assert row.correct == (row.predicted == row.label) == (row.broken_by is None)
    assert {"apgd-margin@9", None, "clean"} <= {row.broken_by for row in rows}


def test_rows_of_a_suite_count_the_passes_until_an_image_breaks(tmp_path: Path) -> None:
    rows = run_suite(tmp_path / "run")
    passes = {
        kind: {row.attack_passes for row in rows if row.broken_by == kind}
        for kind in ("clean", None)
    }
    assert passes["clean"] == {0} and len(passes[None]) == 1  # survivors make all passes
    most = next(iter(passes[None])) or 0
    fell = [row.attack_passes or 0 for row in rows if row.broken_by not in ("clean", None)]
    assert all(0 < count <= most for count in fell) and min(fell) < most


@pytest.mark.parametrize("batch_size", [3, 8, 64])
def test_the_batch_size_does_not_change_the_rows_of_a_suite(
    tmp_path: Path, batch_size: int
) -> None:
    other = run_suite(tmp_path / "other", replace(SUITE_CONDITIONS, batch_size=batch_size))
    assert other == run_suite(tmp_path / "run")


@pytest.mark.parametrize("fail_at", [2, 4, 6])
def test_a_killed_suite_resumes_to_the_same_rows(
    tmp_path: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after the given number of writes, and leaves an incomplete line."""
    complete = run_suite(tmp_path / "complete")
    run_until_killed(monkeypatch, fail_at, lambda: run_suite(tmp_path / "run"))
    for log in (tmp_path / "run" / "stages").glob("*.jsonl"):
        with log.open("ab") as file:
            file.write(b'{"job": "m, mi')
    assert run_suite(tmp_path / "run") == complete


def test_two_processes_write_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process after the other, without a process group: the parts are merged as they are."""
    run_suite(tmp_path / "complete")
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "world", lambda rank=rank: parallel.World(rank, 2))
            patch.setattr(Run, "finish", lambda run: records.read_rows(run.folder))
            run_suite(tmp_path / "run")
    run_suite(tmp_path / "run")
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        for name in ("run", "complete")
    )
    assert ours == theirs
