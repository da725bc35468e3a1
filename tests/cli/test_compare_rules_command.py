"""`equipoise compare-rules` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_files import write_pair

import equipoise as eq
from equipoise.cli.main import run
from equipoise.core.results import read_summary

PAIR = [
    "--accurate",
    "accurate.safetensors",
    "--robust",
    "robust.safetensors",
    "--data",
    "npz:images.npz",
    "--eps",
    "0.002",
    "--device",
    "cpu",
]
QUICK = [
    "--rules",
    "plain,switch",
    "--attack",
    "pgd",
    "--margin-steps",
    "2",
    "--margin-targets",
    "1",
    "--candidates",
    "1",
    "--range-count",
    "20",
    "--count",
    "10",
    "--fit-count",
    "60",
    "--lose-at-most",
    "20",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path, 100)
    return tmp_path


def test_the_command_prints_one_table_and_writes_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows equal to those of the function, byte for byte."""
    monkeypatch.delenv("EQUIPOISE_NO_REPORT", raising=False)
    command = ["compare-rules", *PAIR, *QUICK, "--out", "C", "--export", "X"]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert (
        printed.endswith("report: C/report.html\nnext: equipoise open C\n")
        and "Rules on 10 images" in printed
    )
    for name in ("accurate", "robust", "plain mixing", "confidence", "points lost"):
        assert name in printed
    assert "Rules compared" in Path("C/report.html").read_text()
    assert Path("C/figures/compared-rules.svg").exists() and {
        path.name for path in Path("X").iterdir()
    } == {"rows.csv.gz", "methods.json"}
    assert [method.name for method in read_summary("C").compared][:3] == [
        "accurate",
        "robust",
        "plain mixing",
    ]
    assert run(command) == 0 and capsys.readouterr().out == printed
    data = eq.load_data("npz:images.npz")
    fitted, evaluated = (
        eq.load_data("npz:images.npz", start=10, count=60),
        eq.load_data("npz:images.npz", count=10),
    )
    assert len(data) == 100
    eq.compare_rules(
        "accurate.safetensors",
        "robust.safetensors",
        fitted,
        evaluated,
        threat=eq.Threat("linf", 0.002),
        rules="plain,switch",
        attack="pgd",
        margin_steps=2,
        margin_targets=1,
        candidates=1,
        range_count=20,
        lose_at_most=20,
        out="F",
        device="cpu",
    )
    assert Path("C/rows.jsonl").read_bytes() == Path("F/rows.jsonl").read_bytes()
    Path("C/report.html").unlink()
    assert run([*command, "--no-report"]) == 0
    assert "report.html" not in capsys.readouterr().out and not Path("C/report.html").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--rules", "nuts,swich"], "did you mean 'switch'?"),
        (["--gate", "nowhere"], "`gate` must be a file or folder that exists"),
        (["--fit-start", "5"], "`data` must be other images than those that are fitted on"),
        (["--fit-count", "95"], "`count` must be at most 90"),
        (["--beta", "0.9"], "`target` must be at most one of"),
        (["--confidence", "0.9"], "`confidence` must be left out unless `promise` is probability"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert run(["compare-rules", *PAIR, *QUICK, *more, "--out", "N"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (folder / "N").exists()
