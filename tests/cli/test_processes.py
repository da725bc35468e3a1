"""`--processes N`: a command in several processes of this machine, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.main import COMMANDS, IN_PROCESSES, load_command
from equipoise.core import launch
from equipoise.core.checks import InputError
from equipoise.core.device import resolve

EVALUATE = [
    "evaluate",
    "zoo:cnn_small",
    "--data",
    "digits",
    "--count",
    "12",
    "--attack",
    "pgd",
    "--steps",
    "2",
    "--no-report",
    "--device",
    "cpu",
    "--out",
    "run",
]


def equipoise(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def test_several_processes_write_the_rows_of_one_and_the_first_prints(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise RuntimeError"
    )  # the folder of the user is none to import from
    temporary = tmp_path / "a place for temporary files"
    temporary.mkdir()
    done = [
        subprocess.run(
            [sys.executable, "-P", "-m", "equipoise", *EVALUATE[:-1], name, "--processes", number],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        for name, number in (("one", "1"), ("two", "2"))
    ]
    assert [run.returncode for run in done] == [0, 0], done[1].stderr
    one, two = (
        sorted((tmp_path / name / "rows.jsonl").read_text().splitlines()) for name in ("one", "two")
    )
    assert one == two and len(one) == 24
    assert done[1].stdout.count("summary.json") == 1 and "Traceback" not in done[1].stderr
    assert done[0].stdout.replace("one", "two") == done[1].stdout
    assert not list(temporary.iterdir()), "the file in which they met is removed"


def test_processes_meet_in_a_file_that_those_below_them_do_not_know(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("""import os, torch
from torch.distributed.distributed_c10d import _get_default_store
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 10)
    def forward(self, x):
        if torch.distributed.is_initialized():
            store = _get_default_store().underlying_store
            with open("met-" + os.environ["RANK"], "w") as file:
                print(type(store).__name__, "EQUIPOISE_MEETING_FILE" in os.environ, file=file)
        return self.last(x.flatten(1))
""")
    done = equipoise(tmp_path, "evaluate", "python:nets.py:Net", *EVALUATE[2:], "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"met-{rank}").read_text() for rank in (0, 1)] == ["FileStore False\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["evaluate", "zoo:no-such", *EVALUATE[2:], "--processes", "2"], "no-such"),
        (
            [*EVALUATE, "--processes", "0"],
            "`processes` must be a whole number of at least 1, got 0",
        ),
        ([*EVALUATE, "--processes", "100000"], "`processes` must be at most 1024, got 100000"),
        (
            [*EVALUATE, "--processes", "2", "--processes", "3"],
            "`processes` must be typed as an option, and once, got 3",
        ),
        (["fit", "--processes", "2"], "No such option: --processes"),
    ],
)
def test_a_mistake_is_one_sentence_of_one_process(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    done = equipoise(tmp_path, *arguments)
    assert done.returncode == 2 and sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
    assert not (tmp_path / "run").exists()


def test_torchrun_has_its_own_number_of_processes(tmp_path: Path) -> None:
    done = equipoise(tmp_path, *EVALUATE, "--processes", "2", WORLD_SIZE="2", RANK="0")
    assert done.returncode == 2
    assert done.stderr == "equipoise: `processes` must be left out under torchrun, got 2\n"


def test_a_file_of_defaults_cannot_start_processes(tmp_path: Path) -> None:
    (tmp_path / "defaults.toml").write_text("processes = 2")
    done = equipoise(tmp_path, *EVALUATE, "--config", "defaults.toml")
    assert done.returncode == 2 and "`processes` must be typed as an option" in done.stderr


def test_an_error_of_any_process_is_printed_and_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("""import os, torch
def net():
    if os.environ["RANK"] == "1":
        raise FileNotFoundError(2, "No such file", "weights.bin")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
""")
    done = equipoise(tmp_path, "evaluate", "python:nets.py:net", *EVALUATE[2:], "--processes", "2")
    assert done.returncode == 2 and "weights.bin" in done.stderr and "Traceback" not in done.stderr


LONG = [
    *EVALUATE,
    "--processes",
    "2",
    "--count",
    "300",
    "--steps",
    "5000",
]  # of repeated options the last counts
# Two images are one batch: the process that has none waits for the other.
WAITING = [*LONG, "--count", "2", "--steps", "200000"]


def _started(folder: Path, line: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """A long command and its processes, after they have begun to work."""
    command = subprocess.Popen(
        [sys.executable, "-m", "equipoise", *line],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    # The first rows are those of clean images, long before the others; they lie in a part until the run ends.
    rows = folder / "run" / "parts" / "0.jsonl"
    while (
        not (rows.exists() and rows.stat().st_size)
        and command.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert command.poll() is None
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    return command, [int(child) for child in children]


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are listed under /proc")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, WAITING),
        pytest.param(signal.SIGINT, 130, LONG, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, LONG, marks=pytest.mark.slow),
    ],
    ids=["waiting", "interrupt", "terminate"],
)
def test_a_signal_reaches_every_process(
    number: signal.Signals, code: int, line: list[str], tmp_path: Path
) -> None:
    command, processes = _started(tmp_path, line)
    command.send_signal(number)
    _, errors = command.communicate(timeout=60)
    assert (
        command.returncode == code and len(processes) == 2 and not any(map(_is_running, processes))
    )
    assert "repeat the command to resume it" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are listed under /proc")
def test_where_one_process_dies_the_others_end(tmp_path: Path) -> None:
    command, processes = _started(tmp_path, LONG)
    os.kill(processes[1], signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 137 and not any(map(_is_running, processes))
    assert errors.endswith(
        "equipoise: a process was ended by signal 9; repeat the command to resume it\n"
    )


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["evaluate", "m", "--processes", "3"], 3),
        (["certify", "m", "--processes=2"], 2),
        (["train", "standard", "--processes", "2", "--help"], 1),
        (["fit", "--processes", "2"], 1),
        ([], 1),
        (["evaluate", "m", "--processes", "1"], 1),
        (["evaluate", "m", "--processes", "two"], 1),
        (["evaluate", "m", "--processes"], 1),
        (["evaluate", "m", "--processes", "²"], 1),
        (["evaluate", "--processes", "2", "--processes=2"], 1),
    ],
)
def test_which_arguments_start_processes(
    arguments: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for alone in ("", "1"):  # the second as launchers of clusters set it
        if alone:
            monkeypatch.setenv("WORLD_SIZE", alone)
        assert launch.requested(arguments, IN_PROCESSES) == count
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.requested(arguments, IN_PROCESSES) == 1, "in a process that was started so"


def test_the_commands_that_start_processes_are_those_with_the_option() -> None:
    def has_option(command: Any) -> bool:
        own = getattr(command, "commands", {"": command})
        return all(
            any(launch.OPTION in parameter.opts for parameter in part.params)
            for part in own.values()
        )

    assert {name for name in COMMANDS if has_option(load_command(name))} == set(IN_PROCESSES)


def test_every_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert resolve("auto").index == rank
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        assert resolve("cpu").type == "cpu"
        with pytest.raises(
            InputError, match=r"`device` must have a GPU for each of the 3 processes, got '2 GPUs'"
        ):
            resolve("cuda")
