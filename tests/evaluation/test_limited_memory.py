"""Batches are halved when the memory of a GPU runs out, and the verdicts are those of small
batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*options: object) -> dict[str, Any]:
    script = Path(__file__).with_name("limited_memory.py")
    process = subprocess.run(
        [sys.executable, script, *map(str, options)], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("attack", ["apgd", "pgd"])
@pytest.mark.parametrize("command", ["attack", "evaluate"])
def test_a_batch_that_does_not_fit_is_halved(attack: str, command: str, tmp_path: Path) -> None:
    runs = ("small", "large", "limited", "same")
    out = {name: [] if command == "attack" else ["--out", tmp_path / name] for name in runs}
    small, large = (
        run("--attack", attack, "--batch-size", size, *out[name])
        for size, name in ((8, "small"), (64, "large"))
    )
    limit = (small["peak"] + large["peak"]) // 2
    limited = run("--attack", attack, "--batch-size", 64, "--limit", limit, *out["limited"])
    print(
        f"{command} {attack}: {small['peak'] / 2**20:.0f} MiB in batches of 8, {large['peak'] / 2**20:.0f} of 64; "
        f"with {limit / 2**20:.0f} MiB {limited['halvings']} halvings, {limited['peak'] / 2**20:.0f} MiB"
    )
    assert (
        small["halvings"] == large["halvings"] == 0 < limited["halvings"]
        and limited["peak"] <= limit
    )
    same = run("--attack", attack, "--batch-size", max(1, 64 >> limited["halvings"]), *out["same"])
    robust = [a == b for a, b in zip(same["predicted"], same["labels"], strict=True)]
    assert limited["predicted"] == same["predicted"] and 0 < sum(robust) < 64
