"""Commands under `torchrun`, started as docs/usage.md says: `torchrun … -m -- equipoise COMMAND …`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from equipoise.cli.main import COMMANDS as NAMES
from equipoise.cli.main import load_command

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "-m",
    "--",
    "equipoise",
]


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        found |= (
            commands(command, (*path, name))
            if hasattr(command, "commands")
            else {(*path, name): command}
        )
    return found


COMMANDS = commands(SimpleNamespace(commands={name: load_command(name) for name in NAMES}))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_option_of_a_command_is_taken_by_torchrun(path: tuple[str, ...]) -> None:
    """Both as `--option value` and as `--option=value`, and whatever comes after."""
    options = [
        flag
        for parameter in COMMANDS[path].params
        for flag in parameter.opts
        if flag.startswith("-")
    ]
    given = [*path, *(text for flag in options for text in (flag, "1", f"{flag}=1"))]
    assert options or path in (("report",), ("open",))
    parsed = get_args_parser().parse_args([*TORCHRUN[3:], *given])
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (
        True,
        "equipoise",
        given,
    )


def test_the_documents_show_this_way() -> None:
    assert "torchrun --nproc-per-node 2 -m -- equipoise" in (
        Path(__file__).parents[2] / "docs" / "usage.md"
    ).read_text("utf-8")


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_evaluate_with_an_option_that_torchrun_also_has(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        "evaluate",
        "zoo:cnn_small",
        "--data",
        "digits",
        "--start",
        "10",
        "--count",
        "6",
        "--attack",
        "pgd",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--out",
        "run",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("summary.json") == 1  # the first process prints
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 12


ONE_PROCESS = {
    "fit": [
        "fit",
        "--accurate",
        "zoo:cnn",
        "--robust",
        "zoo:cnn_small",
        "--data",
        "digits",
        "--out",
        "run",
    ],
    "report": ["report", "run"],
    "demo": ["demo", "--out", "run"],
    "verify": ["data", "verify", "mnist"],
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_other_commands_refuse_in_every_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before they wait for another process, so that none hangs."""
    from equipoise.cli.main import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run(ONE_PROCESS[name]) == 2
    expected = f"equipoise: `{name}` must run in one process, without torchrun, got '2 processes'\n"
    assert capsys.readouterr().err == expected  # the first process prints
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_other_commands_refuse_under_torchrun(name: str, tmp_path: Path) -> None:
    done = torchrun(tmp_path, *ONE_PROCESS[name])
    assert done.returncode == 1 and done.stderr.count("must run in one process") == 1
    assert "exitcode  : 2" in done.stderr
