"""Memory grows with the images as bytes and with the rows, and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_use import COUNTS, IMAGE_BYTES, WORK

ROW_BYTES = 1500  # a row as an object, and its line
SLACK = 32 * 2**20


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    script = Path(__file__).with_name("memory_use.py")
    done = subprocess.run(
        [sys.executable, script, *WORK],
        cwd=tmp_path_factory.mktemp("memory"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Freed tensors go back to the system, so that the peak is what is in use.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "131072"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peaks: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return peaks


@pytest.mark.parametrize("name", WORK)
def test_evaluate_keeps_one_copy_of_the_images(name: str, peaks: dict[str, list[int]]) -> None:
    small, large = peaks[name]
    images = COUNTS[1] - COUNTS[0]
    assert large - small <= images * (IMAGE_BYTES + 2 * ROW_BYTES) + SLACK, (large - small) / 2**20
