"""`equipoise compare` and `equipoise index` as typed, and `equipoise open` for what they write."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import pytest
from small_files import write_files

from equipoise import reporting
from equipoise.cli.main import run

EVALUATE = [
    "evaluate",
    "robust.safetensors",
    "--data",
    "npz:images.npz",
    "--attack",
    "pgd",
    "--steps",
    "2",
    "--batch-size",
    "5",
    "--eps",
    "8/255",
    "--no-report",
]
CERTIFY = [
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
    "--no-report",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two evaluations and a certification of one model."""
    folder = tmp_path_factory.mktemp("compared")
    write_files(folder)
    with contextlib.chdir(folder):
        assert (
            run([*EVALUATE, "--out", "runs/a"])
            == run([*EVALUATE, "--seed", "1", "--out", "runs/b"])
            == 0
        )
        assert run([*CERTIFY, "--out", "runs/c"]) == 0
    return folder


@pytest.fixture
def folder(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The same as the current folder, with nothing printed so far."""
    monkeypatch.chdir(runs)
    capsys.readouterr()
    return runs


def test_compare_index_and_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: urls.append(url))
    assert run(["compare", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "comparison: comparison.html"
    typed = Path("comparison.html").read_bytes()
    assert reporting.compare(["runs/a", "runs/b"], "other.html") == Path("other.html")
    assert Path("other.html").read_bytes() == typed
    assert run(["index", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"index: {Path('runs/index.html')}"
    listed = Path("runs/index.html").read_bytes()
    assert reporting.index("runs").read_bytes() == listed
    Path("runs/index.html").unlink()
    assert run(["open", "comparison.html"]) == run(["open", "runs"]) == 0
    assert urls == [
        Path(name).resolve().as_uri() for name in ("comparison.html", "runs/index.html")
    ]
    assert Path("runs/index.html").read_bytes() == listed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare"], "Missing argument"),
        (["compare", "runs/a"], "at least two run folders"),
        (["compare", "runs/a", "runs/a"], "different run folders"),
        (["compare", "runs/a", "runs/../runs/a/."], "different run folders"),
        (["compare", "runs/a", "runs"], "run.toml"),
        (["compare", "runs/a", "runs/c"], "runs of one kind"),
        (["compare", "runs/a", "runs/b", "--out", "images.npz"], "something else"),
        (["compare", "runs/a", "runs/b", "--out", "runs/a/x.html"], "outside of runs"),
        (["index", "none"], "a folder of runs"),
        (["index", "runs/a"], "outside of runs"),
        (["open", "images.npz"], "a page that Equipoise wrote"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and sorted(folder.rglob("*")) == before
