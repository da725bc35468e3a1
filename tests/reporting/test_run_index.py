"""The start page of a folder of runs: every run with its figures, how far it is, and a link."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from parsed_report import ParsedReport
from several_runs import FIRST, HOSTILE, SECOND, certification, contents, evaluation, training

from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.reporting import index, report, run_index
from equipoise.reporting.run_index import find_runs


def rows_of(page: ParsedReport) -> dict[str, list[str]]:
    """Rows by folder, which is the note below the title."""
    return {row[0].split(" ")[-1]: row for row in page.tables[0][1:]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    evaluation(folder / "a")
    evaluation(folder / "deep" / "er" / "b", SECOND)
    certification(folder / "c", [0.3, 0.6])
    training(folder / "t", [1.0])
    return folder


def test_every_run_is_listed_with_its_figures(runs: Path) -> None:
    before = contents(runs)
    path = index(runs)
    assert path == runs / "index.html" and {**contents(runs), path: 0} == {**before, path: 0}
    page = ParsedReport(path)
    assert page.tables[0][0] == [
        "run",
        "kind",
        "data",
        "n",
        "clean accuracy",
        "robust accuracy",
        "average radius",
        "date",
        "state",
    ]
    rows = rows_of(page)
    assert rows.keys() == {"a", "deep/er/b", "c", "t"}
    date = records.read_description(runs / "a" / "run.toml").settings["date"]
    assert rows["a"] == [
        "Evaluation of mixed a",
        "evaluate",
        "digits test ℓ∞ ≤ 8/255",
        "8",
        "75.0 % [34.9, 96.8]",
        "50.0 % [15.7, 84.3]",
        "–",
        date,
        "finished",
    ]
    assert rows["deep/er/b"][4:6] == ["87.5 % [47.3, 99.7]", "12.5 % [0.3, 52.7]"]
    assert rows["c"][2] == "digits test" and rows["c"][6].startswith("0.450 [")
    assert (
        rows["t"][0].startswith("Training")
        and rows["t"][1] == "train"
        and rows["t"][4].startswith("80.0 % [")
    )
    assert ("data-order", "0.5") in page.attributes


def test_of_several_models_the_measured_one_is_named_once(tmp_path: Path) -> None:
    evaluation(tmp_path / "a", {"long/path/robust.pt": SECOND["mixed"], **FIRST})
    (row,) = ParsedReport(index(tmp_path)).tables[0][1:]
    assert row[0].endswith("mixed a") and row[4] == "75.0 % [34.9, 96.8]"


def test_runs_inside_of_runs_are_parts(runs: Path) -> None:
    evaluation(runs / "a" / "sweep" / "x")
    kinds = {name: row[1] for name, row in rows_of(ParsedReport(index(runs))).items()}
    assert kinds == {
        "a": "evaluate",
        "a/sweep/x": "part: evaluate",
        "deep/er/b": "evaluate",
        "c": "certify",
        "t": "train",
    }


def test_rows_of_finished_runs_are_not_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many large runs are listed quickly."""

    def fail(*arguments: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(records, "read_rows", fail)
    assert len(rows_of(ParsedReport(index(runs)))) == 4


def test_unfinished_runs_say_how_far_they_are(tmp_path: Path) -> None:
    evaluation(tmp_path / "half", finished=False)
    training(tmp_path / "early", [1.0], finished=False)
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "half" / "run.toml", tmp_path / "new")
    page = ParsedReport(index(tmp_path))
    states = {name: row[-1] for name, row in rows_of(page).items()}
    assert states == {
        "half": "not finished 8 of 16 rows",
        "early": "not finished 1 of 3 epochs",
        "new": "not finished 0 of 16 rows",
    }
    assert "3 not finished; the newest first." in page.text


def test_unreadable_folders_are_listed_with_the_reason(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "run.toml").write_text("[[[")
    (runs / "c" / "summary.json").write_text("{}")
    wrong = (runs / "t" / "run.toml").read_text().replace("[identity.data]", "[[identity.data]]")
    (runs / "t" / "run.toml").write_text(wrong)
    walk = os.walk

    def closed(folder: Path, onerror: Any) -> Any:
        onerror(PermissionError(13, "Permission denied", str(runs / "closed")))
        return walk(folder, onerror=onerror)

    monkeypatch.setattr(os, "walk", closed)
    table = ParsedReport(index(runs)).tables[0]
    unreadable = {row[0].split(" ")[0]: row[0] for row in table if row[-1] == "unreadable"}
    assert unreadable.keys() >= {"broken", "c", "closed"} and len(table) == 1 + 6
    assert "Permission denied" in unreadable["closed"] and "run.toml" in unreadable["broken"]
    assert "summary.json" in unreadable["c"]


def test_links_are_relative_and_only_to_reports_that_exist(runs: Path, tmp_path: Path) -> None:
    odd = evaluation(runs / "50% of #1")
    report(odd)
    for out, start in ((None, ""), (tmp_path / "x.html", "runs/")):
        page = ParsedReport(index(runs, out))
        assert [value for name, value in page.attributes if name == "href"] == [
            f"{start}50%25%20of%20%231/report.html"
        ]


def test_names_are_text(tmp_path: Path) -> None:
    evaluation(tmp_path / "runs" / HOSTILE, {HOSTILE: SECOND["mixed"]}, data=HOSTILE)
    page = ParsedReport(index(tmp_path / "runs"))
    assert "<script>alert" not in page.source and len(page.scripts) == 2
    (row,) = page.tables[0][1:]
    assert row[0].endswith(HOSTILE) and row[2].startswith(HOSTILE)


def test_bounds_are_said(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(find_runs(runs).runs) == 4 and find_runs(runs).is_complete
    (runs / "link").symlink_to(runs / "deep")
    (runs / ".hidden").mkdir()
    shutil.copy(runs / "a" / "run.toml", runs / ".hidden")
    assert len(find_runs(runs).runs) == 4
    monkeypatch.setattr(run_index, "MOST", 2)
    assert len(find_runs(runs).runs) == 2 and "there may be more" in ParsedReport(index(runs)).text
    monkeypatch.setattr(run_index, "MOST", 2000)
    monkeypatch.setattr(run_index, "DEPTH", 1)
    assert len(find_runs(runs).runs) == 3 and not find_runs(runs).is_complete


def test_what_has_no_index_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    before = contents(tmp_path)
    for folder, words in (
        (tmp_path / "none", "be a folder of runs"),
        (tmp_path / "empty", "hold at least one run"),
        (runs / "a", "outside of runs"),
        (runs / "a" / "rows.jsonl", "be a folder of runs"),
    ):
        with pytest.raises(InputError, match=words):
            index(folder)
    assert contents(tmp_path) == before
    (runs / "index.html").write_text("mine")
    with pytest.raises(InputError, match="something else"):
        index(runs)
    assert (runs / "index.html").read_text() == "mine"


@pytest.mark.parametrize("value", [5, ["a"], "a\0b", b"x"])
def test_wrong_types_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`folder` must"):
        index(value)
    with pytest.raises(InputError, match="`out` must"):
        index(tmp_path, value)
