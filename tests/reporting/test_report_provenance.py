"""Training curves and provenance."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import result, write_run

from equipoise.core import records
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, EpochRow, Row
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.provenance import flatten, progress, provenance, training
from equipoise.reporting.section import Section, read_run
from equipoise.reporting.title import title


@pytest.fixture
def section(tmp_path: Path) -> Section:
    rows = [
        EpochRow(
            index=epoch,
            model="trained",
            attack="epoch",
            loss=2.0 - epoch,
            accuracy=0.5,
            lr=0.1,
            seconds=1.0,
            images_per_second=90.0,
            validation={"clean": 0.7, "noisy": 0.6} if epoch else {},
        )
        for epoch in range(2)
    ]
    summary = Summary(
        command="train", seconds=2.0, best_epoch=1, results=(result("best", "clean", 0.7, n=20),)
    )
    section = training(write_run(tmp_path / "run", summary, rows))
    assert section is not None
    return section


def test_the_best_epoch_comes_first(section: Section) -> None:
    assert (
        section.prose[0].startswith("The best of 2 epochs is epoch 2.")
        and "n = 20" in section.prose[1]
    )


def test_the_table_has_what_the_rows_have(section: Section) -> None:
    assert [cell.text for cell in section.tables[0].body[0]] == [
        "1",
        "2.0000",
        "0.1",
        "50.0 %",
        "–",
        "–",
        "90",
    ]


def test_the_figure_has_a_line_per_accuracy(section: Section) -> None:
    with styled(LIGHT):
        loss, accuracies, rate = section.pictures[0].draw(LIGHT).axes
    assert np.asarray(loss.lines[0].get_ydata()).tolist() == [2.0, 1.0]
    assert np.asarray(rate.lines[0].get_ydata()).tolist() == [0.1, 0.1]
    assert [line.get_label() for line in accuracies.lines] == [
        "training",
        "held out, clean",
        "held out, under noise",
    ]


def test_other_runs_have_no_training_section(tmp_path: Path) -> None:
    assert training(write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))) is None


def test_provenance_has_identity_settings_and_command(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.5),
        identity={"seed": 0, "data": {"name": "shapes", "classes": ["a", "b"]}},
        settings={"device": "cpu", "command": "equipoise evaluate m"},
    )
    section = provenance(run)
    assert section.code == "equipoise evaluate m" and "1.5 seconds" in section.prose[0]
    settings, identity = (
        [[cell.text for cell in row] for row in table.body] for table in section.tables
    )
    assert identity == [["seed", "0"], ["data.name", "shapes"], ["data.classes", "a, b"]]
    assert settings[:3] == [["data", "shapes"], ["seed", "0"], ["device", "cpu"]]
    assert settings[3:] == [["date", datetime.date.today().isoformat()]]
    assert [table.collapsed for table in section.tables] == [False, True]


def test_no_python_repr_is_shown() -> None:
    flat = flatten(
        {
            "stages": [{"attack": "apgd", "steps": 5, "eot": False}, {"attack": "square"}],
            "b": [1, True],
        }
    )
    assert flat == {
        "stages.1.attack": "apgd",
        "stages.1.steps": "5",
        "stages.1.eot": "no",
        "stages.2.attack": "square",
        "b": "1, yes",
    }


def test_the_title_says_what_data_images_threat_and_day(tmp_path: Path) -> None:
    identity = {
        "threat": {"norm": "linf", "eps": 8 / 255},
        "data": {"name": "cifar10", "split": "test", "count": 9},
    }
    run = write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.5),
        identity=identity,
        settings={"references": ["mixture:runs/fit"], "date": "2026-11-16"},
    )
    name, details = title(run)
    assert name == "Evaluation of fit"
    today = datetime.date.today().isoformat()
    assert details == f"Equipoise · evaluate · cifar10 test · n = 9 · ℓ∞ ≤ 8/255 · {today} · run"
    several = write_run(
        tmp_path / "several",
        Summary(command="fit", seconds=1.5),
        settings={"references": list("abcde")},
    )
    assert title(several)[0] == "Fitted mixture of a, b, c and 2 more"
    assert (
        title(write_run(tmp_path / "other", Summary(command="unknown", seconds=1.5)))[0] == "other"
    )


def test_a_run_keeps_the_day_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.5))
    before = (tmp_path / "run" / "run.toml").read_text("utf-8")
    changed = before.replace(datetime.date.today().isoformat(), "2020-02-02")
    (tmp_path / "run" / "run.toml").write_text(changed, "utf-8")
    again = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.5))
    assert again.settings["date"] == "2020-02-02" and changed != before


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    run = records.Run(
        tmp_path / "run",
        {
            "command": "evaluate",
            "data": {"name": "d", "count": 9},
            "attacks": {"m": {"clean": {}, "pgd": {}}},
        },
        {},
    )
    run.append(
        AttackRow(index=i, model="m", attack="clean", label=0, predicted=0, correct=True)
        for i in range(4)
    )
    view = read_run(tmp_path / "run")
    section = progress(view)
    assert section is not None and section.title == "This run is not finished"
    assert [[cell.text for cell in row] for row in section.tables[0].body] == [
        ["m", "clean", "4 of 9"],
        ["m", "pgd", "0 of 9"],
    ]
    assert [(item.metric, item.value, item.n) for item in view.summary.results] == [
        ("clean", 1.0, 4)
    ]
    assert progress(write_run(tmp_path / "done", Summary(command="evaluate", seconds=1.5))) is None


def unfinished(folder: Path, identity: dict[str, Any], rows: list[Row]) -> Section:
    """What the report of a run with these rows and no summary says first."""
    records.Run(folder, identity, {}).append(rows)
    section = progress(read_run(folder))
    assert section is not None
    return section


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"epochs": 5}, "3 of 5 epochs are done; all figures below are of them."),
        ({}, "3 epochs are done; all figures"),
        ({"epochs": 3}, "All 3 epochs are done. What is left is the summary"),
    ],
)
def test_unfinished_training_counts_epochs(
    tmp_path: Path, plan: dict[str, int], expected: str
) -> None:
    rows: list[Row] = [
        EpochRow(
            index=i,
            model="train",
            attack="epoch",
            loss=1.0,
            accuracy=0.5,
            lr=0.1,
            seconds=1.0,
            images_per_second=9.0,
        )
        for i in range(3)
    ]
    section = unfinished(tmp_path / "run", {"command": "train", "plan": plan}, rows)
    assert section.prose[0].startswith(expected) and not section.tables
    assert not any(word in " ".join(section.prose) for word in ("attack", "images"))
    curves = training(read_run(tmp_path / "run"))
    assert curves is not None and "n = 0" not in curves.prose[0]


def test_a_run_whose_images_are_all_measured_says_what_is_left(tmp_path: Path) -> None:
    rows: list[Row] = [
        AttackRow(index=i, model="m", attack=attack, label=0, predicted=0, correct=True)
        for i in range(4)
        for attack in ("clean", "pgd")
    ]
    identity = {
        "command": "evaluate",
        "data": {"name": "d", "count": 4},
        "attacks": {"m": {"clean": {}, "pgd": {}}},
    }
    assert (
        "What is left is the work after the last attack"
        in unfinished(tmp_path / "all", identity, rows).prose[0]
    )
    assert "too low until it ends" in unfinished(tmp_path / "some", identity, rows[:-1]).prose[0]
    assert "suite" not in unfinished(tmp_path / "clean", identity, rows[:1]).prose[0]


@pytest.mark.parametrize(
    ("norm", "eps", "shown"),
    [
        ("linf", 8 / 255, "8/255"),
        ("linf", 0.5 / 255, "0.5/255"),
        ("linf", 0.03, "0.03"),
        ("linf", 0.5, "0.5"),
        ("l2", 0.5, "0.5"),
    ],
)
def test_an_eps_in_bytes_is_shown_as_a_fraction(norm: str, eps: float, shown: str) -> None:
    assert flatten({"threat": {"norm": norm, "eps": eps}})["threat.eps"] == shown
