"""Every command writes its report itself; `equipoise open` shows it."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import pytest
from small_files import write_files

from equipoise.cli.main import run

EVALUATE = [
    "evaluate",
    "robust.safetensors",
    "--data",
    "npz:images.npz",
    "--out",
    "run",
    "--attack",
    "pgd",
    "--steps",
    "2",
    "--batch-size",
    "5",
    "--eps",
    "8/255",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_NO_REPORT")
    write_files(tmp_path)
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: urls.append(url))
    return urls


def test_an_evaluation_writes_its_report(
    folder: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(EVALUATE) == 0
    end = [f"report: {Path('run/report.html')}", "next: equipoise open run"]
    assert capsys.readouterr().out.splitlines()[-2:] == end
    text = (folder / "run/report.html").read_text("utf-8")
    assert 'id="images-gallery"' in text and "robust accuracy" in text
    before = (folder / "run/report.html").stat().st_mtime_ns
    assert run(["open", "run"]) == 0
    assert opened == [(folder / "run/report.html").resolve().as_uri()]
    assert (folder / "run/report.html").stat().st_mtime_ns == before
    late = before / 1e9 + 10
    os.utime(folder / "run/summary.json", (late, late))
    assert run(["open", "run"]) == 0
    assert (folder / "run/report.html").stat().st_mtime_ns > before


def test_no_report_is_written_if_none_is_wanted(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*EVALUATE, "--no-report"]) == 0
    assert "report" not in capsys.readouterr().out and not (folder / "run/report.html").exists()
    monkeypatch.setenv("EQUIPOISE_NO_REPORT", "1")
    assert run(EVALUATE) == 0
    assert not (folder / "run/report.html").exists()
    (folder / "run" / "summary.json").unlink()
    assert run(["open", "run"]) == 0
    assert "This run is not finished" in (folder / "run/report.html").read_text("utf-8")
    assert len(opened) == 1


def test_a_folder_without_a_run_is_not_opened(
    folder: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["open", "nothing"]) == 2
    assert (
        opened == []
        and "nothing must be a run folder, got no such folder" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "command",
    [
        [
            "certify",
            "robust.safetensors",
            "--data",
            "npz:images.npz",
            "--count",
            "4",
            "--sigma",
            "0.25",
            "--samples",
            "20",
            "--n0",
            "4",
        ],
        [
            "train",
            "standard",
            "--data",
            "npz:images.npz",
            "--arch",
            "cnn_small",
            "--epochs",
            "1",
            "--batch-size",
            "4",
        ],
    ],
)
def test_other_commands_write_theirs(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--out", "run"]) == 0, capsys.readouterr().err
    end = [f"report: {Path('run/report.html')}", "next: equipoise open run"]
    assert capsys.readouterr().out.splitlines()[-2:] == end
    assert (folder / "run/report.html").exists()
