from __future__ import annotations

import os
from pathlib import Path

import pytest

from equipoise.core import files


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    files.write_atomic(path, "old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_incomplete_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "parts" / "0.jsonl"
    files.append_durably(path, "one\n")
    files.append_durably(path, "two\nthr")
    files.remove_incomplete_line(path)
    assert path.read_text() == "one\ntwo\n"
