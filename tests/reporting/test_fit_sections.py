"""Sections of a fitted mixture, of alphas, of training and of provenance."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import explored_run
import numpy as np
import pytest
import report_runs
import synthetic_run
from synthetic_run import figure, result, shown, texts, values, write_run

from equipoise.core import arrays, stats
from equipoise.core.arrays import FitArrays, FrontierArrays
from equipoise.core.promises import Target
from equipoise.core.results import Cost, FitSummary, Summary
from equipoise.core.rows import AttackRow, EpochRow
from equipoise.reporting import fit, provenance, training, verdict
from equipoise.reporting.run_view import RunView, read_run

FIT = FitSummary(
    helped=True,
    promise="loses at most 2 points",
    clean=0.85,
    robust_clean=0.8,
    robust_attacked=0.5,
    q=0.3,
    alpha=0.77,
    rejected={"too near": 3},
    notes=("round 1",),
)


def fit_arrays() -> FitArrays:
    rng = np.random.default_rng(3)
    margins: dict[str, Any] = {}
    for images in ("clean", "attacked"):
        for when in ("before", "after"):
            margins[f"{images}_{when}"] = rng.random(50)
    margins["clean_after"][:] = 0.25
    return FitArrays(
        q=0.3,
        **margins,
        clean_correct=rng.random(50) < 0.7,
        attacked_correct=rng.random(50) < 0.7,
        landscape=rng.random((6, 8, 7)),
        usable=rng.random((6, 8, 7)) < 0.9,
        axis_s=np.geomspace(0.05, 5, 7),
        axis_p=np.linspace(1, 4, 8),
        axis_c=np.linspace(-1.1, 0, 6),
        selected=np.array([1.0, 2.0, -0.5]),
        map_curve=np.array([[0.8, 0.5], [0.85, 0.48], [0.85, 0.47]]),
        plain_curve=np.array([[0.8, 0.5], [0.82, 0.48]]),
    )


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    folder = synthetic_run.make(tmp_path / "run", n=20, with_sweep=False, fit=FIT)
    arrays.save(folder, fit_arrays())
    return read_run(folder)


def changed(run: RunView, **more: Any) -> RunView:
    return replace(run, summary=replace(run.summary, **more))


def test_the_fit_says_what_it_promises_and_what_it_rejected(run: RunView) -> None:
    section = shown(fit.fitted(run))
    assert section.text[0] == "The mixture loses at most 2 points."
    assert "calibration half" in section.text[1] and "85.0 %" in section.text[1]
    assert [texts(table) for table in section.tables] == [
        [["round 1"], ["too near: 3 candidates rejected"]]
    ]
    promised = changed(run, fit=replace(FIT, promised=Target(0.02, confidence=0.95)))
    assert "At most 5 %" in shown(fit.fitted(promised)).text[2]


def test_mixednuts_says_that_it_promises_nothing(run: RunView) -> None:
    paper = replace(
        FIT,
        helped=False,
        promise="promises nothing",
        rule="paper",
        objective=0.5,
        recomputed_objective=0.667,
    )
    text = " ".join(shown(fit.fitted(changed(run, fit=paper))).text)
    assert text.startswith("Promises nothing.") and "calibration half" not in text
    assert "50.0 %" in text and "66.7 % if the mapped model is attacked again" in text


def test_the_slider_moves_along_what_the_mixtures_do_on_the_images(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=60, pictures=6)
    stored = FrontierArrays.load(run.folder)
    assert stored is not None
    labels = {row.index: row.label for row in run.rows if isinstance(row, AttackRow)}
    label = np.array([labels[index] for index in stored.index.tolist()])
    drawn = figure(fit.frontier(run), "frontier")
    assert "binding" not in drawn.title and "range" in str(drawn.specification["params"])
    assert [record["step"] for record in drawn.records] == list(range(1, len(stored.alpha) + 1))
    for record in drawn.records:
        at = stored.alpha.tolist().index(record["alpha"])
        clean = stats.share((stored.predicted[at] == label).tolist())
        robust = stats.share(stored.standing[at].tolist())
        assert record["clean"] == pytest.approx(clean.value, abs=1e-5)
        assert record["robust_high"] == pytest.approx(robust.high, abs=1e-5)


def test_the_frontier_on_fitting_images_has_only_gains(run: RunView) -> None:
    drawn = figure(fit.frontier(run), "fit-trade-off")
    assert values(drawn, "fitted", "clean", "robust") == [(0.8, 0.5), (0.85, 0.48)]
    assert values(drawn, "plain mixing", "label")[-1] == ("loses 2.0 points",)


def test_margins_without_and_with_the_map(run: RunView) -> None:
    section = shown(fit.map_margins(run))
    stored = FitArrays.load(run.folder)
    assert stored is not None
    for name, margins in (
        ("margins-before", stored.attacked_before),
        ("map-margins", stored.attacked_after),
    ):
        drawn = [x for (x,) in values(figure(section, name), "attacked, correct", "x")]
        assert drawn == np.sort(margins[stored.attacked_correct]).round(4).tolist()
    assert "0.3 (dashed)" in section.text[0] and "n = 50" in section.text[0]
    alone = replace(FIT, helped=False)
    same = replace(stored, clean_after=stored.clean_before, attacked_after=stored.attacked_before)
    arrays.save(run.folder, same)
    assert fit.map_margins(changed(run, fit=alone)) is None


def test_the_search_is_shown_where_it_says_something(run: RunView) -> None:
    drawn = figure(fit.landscape(run), "landscape")
    stored = FitArrays.load(run.folder)
    assert stored is not None and len(drawn.records) == stored.landscape.size
    largest = max(record["value"] for record in drawn.records)
    assert largest == pytest.approx(stored.landscape.max(), abs=1e-4)
    arrays.save(run.folder, replace(stored, landscape=np.ones_like(stored.landscape)))
    assert fit.landscape(run) is None


def test_accuracy_at_every_alpha(tmp_path: Path) -> None:
    run = read_run(synthetic_run.make(tmp_path / "run", n=40))
    sweep = run.subrun("sweep")
    assert sweep is not None
    section = shown(fit.alphas(run))
    for metric, name in (("clean", "clean accuracy"), ("pgd", "under pgd")):
        expected = [(item.alpha, round(item.value, 5)) for item in sweep.alphas("mixed", metric)]
        assert values(figure(section, "alpha"), name, "x", "y") == expected
    assert [row[0] for row in texts(section.tables[0])] == ["0", "0.25", "0.5", "0.75", "1"]
    assert "fitting images" in section.text[1]


def test_training_shows_every_epoch(tmp_path: Path) -> None:
    run = report_runs.training(tmp_path / "run")
    section = verdict.verdict(run)
    assert "best of 8 epochs is epoch 8" in section.text[1]
    drawn = figure(section, "training")
    assert values(drawn, "held out, clean", "y")[:2] == [(0.5,), (0.54,)]
    exact = stats.of_share(0.54, report_runs.HELD_OUT)
    assert values(drawn, "held out, clean", "y_low", x=2) == [(round(exact.low, 5),)]
    details = shown(training.training(run))
    assert values(figure(details, "training-loss"), "loss", "y")[:2] == [(2.0,), (1.0,)]
    assert texts(details.tables[0])[0][:4] == ["1", "2.0000", "0.1", "50.0 %"]


def test_accuracy_under_noise_is_shown(tmp_path: Path) -> None:
    epoch = EpochRow(
        index=0,
        model="trained",
        attack="epoch",
        loss=1.0,
        accuracy=0.5,
        lr=0.1,
        seconds=1.0,
        images_per_second=90.0,
        validation={"noisy": 0.6},
    )
    summary = Summary(
        command="train", seconds=2.0, best_epoch=0, results=(result("best", "noisy", 0.6, n=20),)
    )
    section = verdict.verdict(write_run(tmp_path / "run", summary, [epoch]))
    assert values(section.figures[0], "held out, under noise", "x", "y") == [(1, 0.6)]
    assert "held out, under noise" in section.text[0]


def test_the_cost_names_what_runs_and_how_often(run: RunView) -> None:
    costs = (
        Cost(model="accurate", parameters=2_000_000, flops=1.5e9),
        Cost(model="mixed, gated", accurate_share=0.22, robust_passes=2.345),
    )
    section = shown(provenance.cost(changed(run, costs=costs)))
    assert texts(section.tables[0]) == [
        ["accurate", "2.00 M", "1.50 G"],
        ["mixture, gated", "–", "–"],
    ]
    assert "22.0 %" in section.text[0] and "2.35 views" in section.text[1]


def test_provenance_has_identity_settings_and_command(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.5),
        identity={"seed": 0, "data": {"name": "shapes", "classes": ["a", "b"]}},
        settings={"device": "cpu", "command": "equipoise evaluate m"},
    )
    section = provenance.provenance(run)
    settings, identity = (texts(table) for table in section.tables)
    assert section.code == "equipoise evaluate m" and "1.5 seconds" in section.text[0]
    assert identity == [["seed", "0"], ["data.name", "shapes"], ["data.classes", "a, b"]]
    assert settings[:3] == [["data", "shapes"], ["seed", "0"], ["device", "cpu"]]
    assert settings[3:] == [["date", datetime.date.today().isoformat()]]


def test_a_training_report_has_its_settings(tmp_path: Path) -> None:
    run = report_runs.training(tmp_path / "run")
    settings = dict(texts(provenance.provenance(run).tables[0]))
    assert settings["arch"] == "resnet8" and settings["objective.name"] == "trades"


def test_no_python_repr_is_shown() -> None:
    stages = [{"attack": "apgd", "steps": 5, "eot": False}, {"attack": "square"}]
    threat = {"norm": "linf", "eps": 8 / 255}
    assert provenance.flatten({"stages": stages, "b": [1, True], "threat": threat}) == {
        "stages.1.attack": "apgd",
        "stages.1.steps": "5",
        "stages.1.eot": "no",
        "stages.2.attack": "square",
        "b": "1, yes",
        "threat.norm": "linf",
        "threat.eps": "8/255",
    }


def test_the_title_says_what_data_images_and_threat(tmp_path: Path) -> None:
    identity = {
        "threat": {"norm": "linf", "eps": 8 / 255},
        "data": {"name": "cifar10", "split": "test", "count": 9},
    }
    summary, references = Summary(command="evaluate", seconds=1.0), ["a/b.pt", "c", "d", "e"]
    run = write_run(
        tmp_path / "run", summary, identity=identity, settings={"references": references}
    )
    title, facts = provenance.title(run)
    assert title == "Evaluation of b, c, d, 1 more"
    assert "cifar10 test · n = 9 · ℓ∞ ≤ 8/255" in facts
