from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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


def killed_writers_file(folder: Path) -> Path:
    """A temporary file as a killed process leaves it."""
    path = folder / f".equipoise-{7:032x}.tmp"
    path.write_bytes(b"half a checkpoi")
    return path


def test_the_next_write_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    stale, other = killed_writers_file(tmp_path), tmp_path / ".other.0123456789abcdef.tmp"
    other.write_text("not ours")
    files.write_atomic(tmp_path / "a", "1")
    assert (
        not stale.exists()
        and other.read_text() == "not ours"
        and (tmp_path / "a").read_text() == "1"
    )


def test_the_temporary_file_of_a_running_writer_stays(tmp_path: Path) -> None:
    with files.atomic_writer(tmp_path / "large") as file:
        file.write(b"first ")
        files.write_atomic(tmp_path / "small", "1")
        file.write(b"second")
    assert (tmp_path / "large").read_bytes() == b"first second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_links_are_neither_followed_nor_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".equipoise-{1:032x}.tmp").symlink_to(precious)
    (tmp_path / "run" / "out.json").symlink_to(precious)
    (tmp_path / "run" / "rows.jsonl").symlink_to(precious)
    files.write_atomic(tmp_path / "run" / "out.json", "new")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        files.append_durably(tmp_path / "run" / "rows.jsonl", "row\n")
    assert precious.read_text() == "data" and (tmp_path / "run" / "out.json").read_text() == "new"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["out.json", "rows.jsonl"]


def test_a_guessed_temporary_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    monkeypatch.setattr(files, "remove_stale", lambda folder: None)
    (tmp_path / f".equipoise-{0:032x}.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_atomic(tmp_path / "a", "1")
    assert precious.read_text() == "data"


@pytest.mark.parametrize(
    "library", [torch.save, lambda content, file: np.savez_compressed(file, **content)]
)
def test_a_full_disk_is_not_hidden_by_a_library(
    library: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    """Archives are closed in spite of the error, which raises another one."""
    resource = pytest.importorskip("resource")
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="File too large") as raised,
            files.atomic_writer(tmp_path / "new") as file,
        ):
            library({"weights": torch.rand(1_000_000)}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.filename == str(tmp_path / "new") and not list(tmp_path.iterdir())


def test_a_failed_append_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "parts" / "0.jsonl", os.write
    files.append_durably(path, "one\n")

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 6:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            files.append_durably(path, "a long second line\n")
    files.append_durably(path, "three\n")
    assert path.read_text() == "one\nthree\n"


def test_names_leave_out_files_of_the_system_and_of_killed_processes(tmp_path: Path) -> None:
    killed_writers_file(tmp_path)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "thesis.tex"):
        (tmp_path / name).touch()
    assert files.names(tmp_path) == {"thesis.tex"}
