"""Starts `replay.py` with the faults of `faults.c` and checks its outcomes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from replay import COMMANDS, QUICK

HERE = Path(__file__).parent
__all__ = ["COMMANDS", "QUICK", "check_faults"]


def check_faults(
    factory: pytest.TempPathFactory,
    *faults: str,
    commands: Sequence[str] = tuple(COMMANDS),
    most: int | None = None,
    again: bool = False,
) -> None:
    """Replay commands with each fault at each event, or at `most` of a command; prints how many
    there were.

    With `again` the commands are repeated on their finished folders, whose files must stay as they
    are.
    """
    folder = factory.getbasetemp() / "faults"  # of the session; the first call fills it
    folder.mkdir(exist_ok=True)
    shim = _build_shim(folder)
    request = {"commands": list(commands), "faults": faults, "most": most, "again": again}
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), *sys.path]),
    }
    process = subprocess.run(
        [sys.executable, str(HERE / "replay.py"), str(folder)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    outcomes = [json.loads(line) for line in process.stdout.splitlines()]
    for outcome in outcomes:
        print(
            f"{outcome['command']}: {len(outcome['events'])} events, {outcome['replays']} faults "
            f"({', '.join(faults)}), {len(outcome['failures'])} failures"
        )
    assert [outcome["command"] for outcome in outcomes] == list(commands)
    assert all(outcome["replays"] > 0 for outcome in outcomes)
    failures = [failure for outcome in outcomes for failure in outcome["failures"]]
    assert not failures, "\n".join(failures)


def _build_shim(folder: Path) -> Path:
    compiler, library = shutil.which("cc") or shutil.which("gcc"), folder / "faults.so"
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    if not library.exists():
        subprocess.run(
            [
                compiler,
                "-O1",
                "-shared",
                "-fPIC",
                "-o",
                str(library),
                str(HERE / "faults.c"),
                "-ldl",
            ],
            check=True,
        )
    return library
