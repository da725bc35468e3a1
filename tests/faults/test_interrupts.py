"""Ctrl-C and SIGTERM: the state is saved, one line says so, and the repeated command says where it
resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replay import COMMANDS, contents, write_models

from equipoise.cli.main import run
from equipoise.core import interrupts
from equipoise.core.records import Run
from equipoise.training.learner import Learner

TRAIN = COMMANDS["train"][:-2]  # without `--save-seconds 0`: nothing is saved but on a signal
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_models(folder)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder; signals are handled as in a shell, also where the tests run in the
    background."""
    monkeypatch.chdir(prepared)
    threads, before = (
        torch.get_num_threads(),
        [signal.getsignal(number) for number in interrupts.SIGNALS],
    )
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in zip(interrupts.SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send_after(count: int, call: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    """`call`, whose `count`-th call is followed by signals."""
    calls = 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        result, calls = call(*arguments), calls + 1
        if calls == count:
            for number in numbers:
                signal.raise_signal(number)
        return result

    return wrapped


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(("step", "epoch"), [(1, 1), (2, 2), (3, 2)])
def test_a_stopped_training_resumes_at_its_step_to_the_same_bytes(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    step: int,
    epoch: int,
) -> None:
    """Two epochs of two steps, stopped within an epoch or between them."""
    out = folder / "run"
    assert run([*TRAIN, "--out", str(out)]) == 0
    complete = contents(out)
    out.rename(folder / "complete")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "take_step", send_after(step, Learner.take_step, number))
        assert run([*TRAIN, "--out", str(out)]) == CODES[number]
    place = f"epoch {epoch} of 2, step {step} of 4"
    sentence = f"equipoise: stopped and saved at {place}; repeat the command to resume it there\n"
    assert capsys.readouterr().err.endswith(sentence)
    with monkeypatch.context() as patch:
        patch.setattr(
            Learner, "take_step", send_after(4 - step + 1, Learner.take_step, signal.SIGKILL)
        )
        assert run([*TRAIN, "--out", str(out)]) == 0, "takes the remaining steps and no more"
    assert f"resuming at {place}\n" in capsys.readouterr().err
    assert contents(out) == complete


def test_a_signal_in_the_last_step_lets_the_training_end(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "take_step", send_after(4, Learner.take_step, signal.SIGTERM))
        assert run([*TRAIN, "--out", str(folder / "run")]) == 143
    assert capsys.readouterr().err.endswith("equipoise: stopped; repeat the command to resume it\n")
    assert (folder / "run" / "summary.json").exists() and not (folder / "run" / "state.pt").exists()


def test_a_second_signal_stops_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Learner, "take_step", send_after(2, Learner.take_step, signal.SIGINT, signal.SIGINT)
    )
    assert run([*TRAIN, "--out", str(folder / "run")]) == 130
    assert not (folder / "run" / "state.pt").exists()
    assert capsys.readouterr().err.endswith("equipoise: stopped; repeat the command to resume it\n")


def test_python_gets_the_message_and_its_handlers_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equipoise import load_data, train

    handlers = [signal.getsignal(number) for number in interrupts.SIGNALS]
    monkeypatch.setattr(Learner, "take_step", send_after(1, Learner.take_step, signal.SIGINT))
    data = load_data("npz:images.npz", count=40)
    with pytest.raises(KeyboardInterrupt, match="stopped and saved at epoch 1 of 2, step 1 of"):
        train(
            "standard",
            data=data,
            arch="cnn_small",
            epochs=2,
            batch_size=20,
            out=folder / "run",
            device="cpu",
        )
    assert (folder / "run" / "state.pt").exists()
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == handlers


@pytest.mark.parametrize(
    ("command", "number"), [("evaluate", signal.SIGTERM), ("evaluate a mixture", signal.SIGINT)]
)
def test_a_stopped_evaluation_keeps_its_rows(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    out = folder / "run"
    arguments = [*COMMANDS[command], "--out", str(out)]
    assert run(arguments) == 0
    complete = contents(out)
    out.rename(folder / "complete")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", send_after(2, Run.append, number))
        assert run(arguments) == CODES[number]
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "equipoise: stopped; repeat the command to resume it"
    )
    assert run(arguments) == 0
    total = {"evaluate": 12, "evaluate a mixture": 28}[command]
    assert f"resuming: 4 of {total} rows\n" in capsys.readouterr().err
    assert contents(out) == complete


def test_signals_that_are_ignored_stay_ignored(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.as_exceptions() as received, interrupts.deferred() as inner:
        signal.raise_signal(signal.SIGINT)
        assert received.number is None and inner.number is None


TWO_SIGNALS = """
import signal
from equipoise.core import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupts.as_exceptions():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("cleaning up", flush=True)
        signal.raise_signal(signal.SIGTERM)
        print("never printed", flush=True)
"""


def test_a_second_signal_ends_a_command_that_is_cleaning_up() -> None:
    process = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert process.returncode == 130 and process.stdout == "cleaning up\n" and process.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_two_processes_stop_at_the_same_step(folder: Path, number: signal.Signals) -> None:
    """A real `torchrun`, stopped twice on the way, ends in the bytes of an uninterrupted one."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "equipoise",
        *TRAIN,
        "--epochs",
        "100",
        "--schedule",
        "constant",
        "--out",
    ]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    out = folder / "run"
    subprocess.run([*launch, str(out)], env=environment, check=True, capture_output=True)
    complete = contents(out)
    out.rename(folder / "complete")
    for rows in (10, 40):
        process = subprocess.Popen(
            [*launch, str(out)], env=environment, stderr=subprocess.PIPE, text=True
        )
        part = out / "parts" / "0.jsonl"
        while not part.exists() or part.read_text().count("\n") < rows:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate()
        assert "equipoise: stopped and saved at epoch" in err, err
        assert (out / "state.pt").exists() and not (out / "summary.json").exists()
    resumed = subprocess.run(
        [*launch, str(out)], env=environment, check=True, stderr=subprocess.PIPE, text=True
    )
    assert "resuming at epoch" in resumed.stderr
    assert contents(out) == complete
