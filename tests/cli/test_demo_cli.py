"""`equipoise demo` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.cli.main import run


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--out", str(tmp_path / "demo"), "--seed", "-1"]) == 2
    assert "`seed` must be" in capsys.readouterr().err and not (tmp_path / "demo").exists()
