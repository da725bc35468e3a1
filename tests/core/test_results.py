from __future__ import annotations

import json
from pathlib import Path

import pytest

from equipoise.core.checks import InputError
from equipoise.core.results import (
    Cost,
    FitSummary,
    Result,
    Summary,
    read_summary,
)
from equipoise.core.threat import Threat

RESULT = {
    "model": "m",
    "metric": "worst",
    "value": 0.5,
    "low": 0.2,
    "high": 0.8,
    "n": 10,
    "threat": {"norm": "linf", "eps": 0.1},
}


def write(folder: Path, content: object) -> Path:
    (folder / "summary.json").write_text(json.dumps(content))
    return folder


def test_a_summary_is_read_back(tmp_path: Path) -> None:
    summary = Summary(
        command="fit",
        seconds=1.5,
        results=(Result(**{**RESULT, "threat": Threat("linf", 0.1)}),),  # type: ignore[arg-type]
        costs=(Cost(model="m", parameters=3),),
        overlap={"mixed": ("1-3",)},
        fit=FitSummary(
            helped=True,
            promise="p",
            clean=0.9,
            robust_clean=0.8,
            robust_attacked=0.5,
            q=0.1,
            alpha=0.9,
            rejected={"reason": 2},
            notes=("note",),
        ),
    )
    assert read_summary(write(tmp_path, summary.to_dict())) == summary


def test_empty_fields_are_left_out() -> None:
    assert Summary(command="train", seconds=1.0).to_dict() == {
        "schema": 2,
        "command": "train",
        "seconds": 1.0,
        "results": [],
    }


def test_results_are_found_by_model_and_metric() -> None:
    summary = Summary(
        command="evaluate",
        seconds=0.0,
        results=(Result(**{**RESULT, "threat": None}),),  # type: ignore[arg-type]
    )
    assert summary.result("m", "worst").count == 5
    with pytest.raises(KeyError, match="there are: "):
        summary.result("m", "clean")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"summary.json must be a table, got \[\]"),
        ({"schema": 3}, r"newer version of Equipoise \(schema 3\).*, which reads schema 2"),
        ({"schema": 1, "verb": "fit"}, r"old version .* run its command again in a new folder"),
        ({"schema": 2, "command": "x"}, "a table with seconds"),
        (
            {"schema": 2, "command": "x", "seconds": "long"},
            "seconds of .* must be a finite number of at least 0, got 'long'",
        ),
        ({"schema": 2, "command": "x", "seconds": 1, "strange": 1}, "unknown key 'strange'"),
    ],
)
def test_damaged_summaries_are_one_sentence(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_summary(write(tmp_path, content))


def test_an_unfinished_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a finished run folder"):
        read_summary(tmp_path)
