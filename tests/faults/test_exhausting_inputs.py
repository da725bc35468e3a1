"""Small inputs that would exhaust time or memory are refused with the true reason, and nothing is
written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exhausting_inputs import COMMANDS, FUNCTIONS, MEMORY


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each case in turn, in a process whose memory is limited; the timeout is only a safety net."""
    script = Path(__file__).with_name("exhausting_inputs.py")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path_factory.mktemp("inputs"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", [*COMMANDS, *FUNCTIONS])
def test_the_true_reason_and_little_memory(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    expected = {**COMMANDS, **FUNCTIONS}[name][1]
    assert expected in outcomes[name]["text"], outcomes[name]["text"][:500]
    assert outcomes[name]["bytes"] < MEMORY
    assert len(outcomes[name]["text"]) < 1000
