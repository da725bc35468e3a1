"""Every reader takes any bytes: byte mutations of a valid file here, coverage-guided fuzzing where
Atheris is there."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import fuzz_targets
import pytest

SEEDS = fuzz_targets.seeds()
INSERTS = (
    b"",
    b"\0",
    b"\xff",
    b"{",
    b"[" * 3000,
    b"9" * 40,
    b"nan",
    b"1e999",
    b'"',
    b"\n",
    b"-1",
    b"true",
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(content) + 1)
        match chance.choice(("flip", "cut", "insert", "repeat", "replace")):
            case "flip" if at < len(content):
                content[at] ^= 1 << chance.randrange(8)
            case "cut":
                del content[at : at + chance.choice((1, 10, 1000))]
            case "insert":
                content[at:at] = chance.choice(INSERTS)
            case "repeat":
                content[at:at] = content[at : at + 50]
            case _:
                insert = chance.choice(INSERTS)
                content[at : at + len(insert)] = insert
    return bytes(content)


def run_cases(name: str, cases: int) -> None:
    target, chance = fuzz_targets.TARGETS[name], random.Random(name)
    assert target(SEEDS[name])
    for _ in range(cases):
        data = mutated(SEEDS[name], chance)
        try:
            target(data)
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error} for {data[:300]!r}")


@pytest.mark.parametrize("name", sorted(fuzz_targets.TARGETS))
def test_mutated_bytes(name: str) -> None:
    run_cases(name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(fuzz_targets.TARGETS))
def test_many_mutated_bytes(name: str) -> None:
    run_cases(name, 5000)
    print(f"{name}: 5000 files")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="Atheris is not installed")
@pytest.mark.parametrize("name", sorted(fuzz_targets.TARGETS))
def test_atheris_for_ten_minutes_in_all(name: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "seed").write_bytes(SEEDS[name])
    seconds = 600 // len(fuzz_targets.TARGETS)
    command = [
        sys.executable,
        fuzz_targets.__file__,
        name,
        str(tmp_path / "corpus"),
        f"-max_total_time={seconds}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds + 300
    )
    assert done.returncode == 0, done.stderr[-3000:]
