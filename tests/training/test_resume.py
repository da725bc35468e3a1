"""Interrupted runs and runs of several processes end in the same weights."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import METADATA, PLAN, dataset, network, same, weights

from equipoise import models
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.parallel import World
from equipoise.core.rows import EpochRow
from equipoise.training import Objective, TrainingPlan, fit_model
from equipoise.training.learner import Learner
from equipoise.training.objectives import IAAT, Adversarial, SmoothMix, Standard

PATHS = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)]
OBJECTIVES: list[Objective] = [
    Standard(),
    IAAT(steps=2, warmup_epochs=1),
    SmoothMix(noises=2, steps=1),
]


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resuming_is_exact_after_every_step(
    objective: Objective, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after each optimiser step in turn, a run ends in the bits of an uninterrupted
    one."""
    plan = dataclasses.replace(PLAN, epochs=2, optimizer=optimizer, lr=0.01, batch_size=32)
    whole = weights(fit_model(network(), objective, dataset(), plan))
    take_step, steps = Learner.take_step, [0]

    def take_one_step(self: Learner, *arguments: Any) -> None:
        if steps[0]:
            raise InterruptionError
        steps[0] += 1
        take_step(self, *arguments)

    monkeypatch.setattr(Learner, "take_step", take_one_step)
    for _ in range(5):
        steps[0] = 0
        with pytest.raises(InterruptionError):
            fit_model(
                network(), objective, dataset(), plan, out=tmp_path / "run", metadata=METADATA
            )
    steps[0] = 0
    model = fit_model(
        network(), objective, dataset(), plan, out=tmp_path / "run", metadata=METADATA
    )
    assert same(whole, weights(model))
    assert [row.index for row in records.read_rows(tmp_path / "run")] == [0, 1]


LONG_PLAN = dataclasses.replace(PLAN, epochs=12)
LONG_OBJECTIVE = Adversarial(eps=0.05, steps=2)
SCRIPT = f"""
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = {PATHS!r}
from test_resume import LONG_OBJECTIVE, LONG_PLAN, METADATA, dataset, fit_model, network
fit_model(network(), LONG_OBJECTIVE, dataset(), LONG_PLAN, out=sys.argv[1], metadata=METADATA)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_and_kill(out: Path, delay: float) -> None:
    """Kill a run at a random moment after its next save."""
    state, before = out / "state.pt", time.time_ns()
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)]) as process:
        while process.poll() is None and not (state.exists() and state.stat().st_mtime_ns > before):
            time.sleep(0.005)
        time.sleep(delay)
        process.kill()


def measured(out: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in records.read_rows(out) if isinstance(row, EpochRow)]
    return [(row.index, row.loss, row.accuracy, row.validation) for row in rows]


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    delays = random.Random(5)
    for _ in range(2):
        run_and_kill(tmp_path / "killed", delays.uniform(0, 0.1))
    assert not (tmp_path / "killed" / "summary.json").exists()
    for name in ("whole", "killed"):
        fit_model(
            network(), LONG_OBJECTIVE, dataset(), LONG_PLAN, out=tmp_path / name, metadata=METADATA
        )
    for name in ("best.safetensors", "last.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert (
        measured(tmp_path / "whole") == measured(tmp_path / "killed")
        and len(measured(tmp_path / "whole")) == 12
    )


# 70 images in batches of 23: the last batch has one image, so that one process has none.
PARALLEL_PLAN = TrainingPlan(
    epochs=3, batch_size=23, lr=0.02, held_out=20, pad=1, ema=0.9, save_seconds=0
)
PARALLEL_OBJECTIVE = IAAT(eps=0.05, growth=0.02, steps=2, warmup_epochs=1)
PARALLEL_SCRIPT = f"""
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = {PATHS!r}
from test_resume import METADATA, PARALLEL_OBJECTIVE, PARALLEL_PLAN, dataset, fit_model, network
from equipoise.core import parallel
with parallel.process_group(torch.device("cpu")) as world:
    assert world.size == 2
    fit_model(network(), PARALLEL_OBJECTIVE, dataset(), PARALLEL_PLAN, out=sys.argv[1], metadata=METADATA)
"""


def test_two_processes_match_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PARALLEL_SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "script.py"),
        str(tmp_path / "two"),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.returncode == 0, process.stderr
    alone = fit_model(
        network(),
        PARALLEL_OBJECTIVE,
        dataset(),
        PARALLEL_PLAN,
        out=tmp_path / "one",
        metadata=METADATA,
    )
    for key, value in weights(models.load(str(tmp_path / "two" / "last.safetensors"))).items():
        torch.testing.assert_close(value, weights(alone)[key], rtol=1e-5, atol=1e-6)
    for one, two in zip(measured(tmp_path / "one"), measured(tmp_path / "two"), strict=True):
        assert all(
            first == pytest.approx(second, rel=1e-4) for first, second in zip(one, two, strict=True)
        )


@pytest.mark.usefixtures("one_thread")
def test_another_number_of_threads_is_another_run(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, epochs=1)
    fit_model(network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA)
    torch.set_num_threads(2)
    with pytest.raises(InputError, match="run has threads = 1, this run has 2"):
        fit_model(network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA)


def test_another_number_of_processes_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(PLAN, epochs=1)
    fit_model(network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA)
    monkeypatch.setattr("equipoise.core.parallel.world", lambda: World(rank=0, size=2))
    with pytest.raises(InputError, match="run has processes = 1, this run has 2"):
        fit_model(network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA)


def test_the_state_of_a_finished_run_is_removed_by_the_next_call(tmp_path: Path) -> None:
    """A kill between the summary and the removal of the state leaves it behind."""
    plan = dataclasses.replace(PLAN, epochs=1)
    for _ in range(2):
        fit_model(network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA)
        assert not (tmp_path / "run" / "state.pt").exists()
        (tmp_path / "run" / "state.pt").touch()
