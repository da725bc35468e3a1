"""The study of adaptive smoothing, with two hardly trained networks and a few digits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from small_pair import conditions, study_run
from small_pair import without_report as without_report

from conftest import draw_figures_once
from equipoise import models
from equipoise.attacks import Apgd, Square, Suite
from equipoise.core.checks import InputError
from equipoise.core.records import read_description, read_rows
from equipoise.core.results import Summary, read_summary
from equipoise.core.rows import AttackRow
from equipoise.data import load_data
from equipoise.evaluation.gate_adversaries import leads
from equipoise.mixing import GatedClassifier, load_model
from equipoise.models import checkpoint
from equipoise.studies import reproduce
from equipoise.studies.adaptive_mixtures import FIXED, GATED, MIXTURES, SelectionSize
from equipoise.studies.adaptive_smoothing import AdaptiveSmoothingStudy, AdaptiveStudySize
from equipoise.studies.settings import StudySettings
from equipoise.studies.study import Pair
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objectives import Standard

PLAN = TrainingPlan(
    epochs=1, batch_size=16, optimizer="adamw", lr=1e-3, held_out=0, ema=0.8, clip=10.0
)
SHORT = Suite(attacks=(Apgd(loss="margin", steps=2),))
TINY = AdaptiveStudySize(
    gate_plan=PLAN,
    gate_width=2,
    gate_steps=2,
    fixed_keeps=(0.8,),
    gate_keeps=(0.8,),
    short_suite=SHORT,
    selection=SelectionSize(
        keep=0.9,
        plain_alphas=(0.5, 0.7, 0.9),
        switch_thresholds=(0.2, 0.5),
        gate_shifts=(0.4,),
        gate_thresholds=(0.0, 0.3, 0.8),
        rounds=1,
        attack=SHORT,
        both_sides=SHORT.attacks,
        map_steps=3,
        map_targets=2,
    ),
    suite=Suite(attacks=(Apgd(loss="margin", steps=3), Square(queries=10))),
    pgd_steps=2,
    target_alphas=(0.0, 1.0),
    ablation_plan=PLAN,
    ablation_steps=2,
    ablation_weights=((0.0, 1.5, 0.2), (1.5, 0.0, 0.0)),
    ablation_scales=(1.0, 4.0),
    sweep_alphas=(0.0, 0.5, 1.0),
    transfer_gammas=(0.0, 0.1, 10.0, math.inf),
    margin_steps=3,
    margin_targets=2,
    test_images=6,
    batch_size=64,
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two networks, trained for a few epochs; the second is the more accurate one, so that a switch
    helps."""
    folder = tmp_path_factory.mktemp("bases")
    images = load_data("digits", split="train", count=300)
    for seed, name in enumerate(("robust", "accurate")):
        model = models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed)
        plan = TrainingPlan(epochs=4, optimizer="adamw", lr=5e-3, held_out=0, seed=seed)
        checkpoint.save(
            folder / f"{name}.safetensors", fit_model(model, Standard(), images, plan), {}
        )
    return str(folder / "accurate.safetensors"), str(folder / "robust.safetensors")


def small_study(folder: Path, references: tuple[str, str]) -> AdaptiveSmoothingStudy:
    images, test = (
        load_data("digits", split="train", count=400),
        load_data("digits", split="test", count=6),
    )
    pair = Pair(
        load_model(references[0]),
        load_model(references[1]),
        references,
        images.slice(300, 60),
        test,
        lambda: images.slice(0, 32),
    )
    return AdaptiveSmoothingStudy(
        study_run(folder, "adaptive-smoothing"), pair, TINY, conditions(0.03, 64)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, references: tuple[str, str]) -> Path:
    """The folder of a study of which every part was run."""
    folder = tmp_path_factory.mktemp("adaptive-smoothing")
    with pytest.MonkeyPatch.context() as patch:
        draw_figures_once(patch)
        small_study(folder, references).run()
    return folder


@pytest.fixture(scope="module")
def summary(finished: Path) -> Summary:
    return read_summary(finished)


def test_all_mixtures_meet_all_adversaries(finished: Path) -> None:
    rows = read_rows(finished)
    assert {row.model for row in rows} == {"accurate", "robust", *MIXTURES}
    gate = {row.attack for row in rows if row.model == "gate on the confidence switch"}
    assert gate == {"clean", "A", "B", "C", "D", "std", "rob"}


def test_an_oracle_gate_is_never_worse(summary: Summary) -> None:
    assert summary.oracle_gate
    assert all(
        bound.value >= summary.result(bound.model, bound.metric).value
        for bound in summary.oracle_gate
    )


def test_c_and_d_together(summary: Summary) -> None:
    joint = {result.model: result.value for result in summary.joint}
    assert joint["plain"] == summary.result("plain", "C").value
    assert joint["gate"] <= min(summary.result("gate", letter).value for letter in "CD")


def test_the_selected_mixtures_can_be_loaded(finished: Path, summary: Summary) -> None:
    assert summary.selections.keys() == set(MIXTURES)
    assert all(selection.keep == 0.9 for selection in summary.selections.values())
    assert isinstance(load_model(f"mixture:{finished}/mixtures/gate-0.9"), GatedClassifier)


def test_the_trade_off_and_the_leads(finished: Path, summary: Summary) -> None:
    trade_off = read_rows(finished / "trade-off")
    assert {row.model for row in trade_off} == {"plain, 0.8", "confidence switch, 0.8"}
    assert {row.model for row in read_rows(finished / "trade-off-gates")} == {
        "gate, 0.8",
        "gate on the confidence switch, 0.8",
    }
    assert list(summary.leads) == leads([*read_rows(finished), *trade_off], GATED, FIXED)


def test_target_alphas_training_adversaries_and_ablation(finished: Path) -> None:
    assert {(row.attack, row.alpha) for row in read_rows(finished / "aimed")} == {
        ("aimed", 0.0),
        ("aimed", 1.0),
    }
    assert {row.model for row in read_rows(finished / "settings")} == {
        f"trained against {name}" for name in "ABC"
    }
    ablation = {row.model for row in read_rows(finished / "ablation")}
    assert ablation == {
        "constant",
        "scale 1",
        "scale 4",
        "c_CE 0, c_BCE 1.5, c_prod 0.2",
        "c_CE 1.5, c_BCE 0, c_prod 0",
    }
    assert read_summary(finished / "ablation").clean_target is not None


def test_without_a_gate(finished: Path) -> None:
    """Figures 2 and 4 and Table 1 agree where they measure the same: PGD on one base, judged by
    that base."""
    sweep, transfer = (read_rows(finished / part) for part in ("alphas", "transfer"))
    confidence = [row for row in read_rows(finished / "confidence") if isinstance(row, AttackRow)]
    assert {(row.attack, row.alpha) for row in sweep} == {
        (attack, alpha) for attack in ("clean", "std", "rob", "mix") for alpha in (0.0, 0.5, 1.0)
    }
    for alpha, attack, base in ((0.0, "std", "accurate"), (1.0, "rob", "robust")):
        on_itself = {
            row.index: row.correct
            for row in sweep
            if isinstance(row, AttackRow) and (row.attack, row.alpha) == (attack, alpha)
        }
        assert on_itself == {
            row.index: row.correct
            for row in transfer
            if isinstance(row, AttackRow) and (row.model, row.alpha) == (base, alpha)
        }
    assert read_summary(finished / "transfer").crossing is not None
    # A correct prediction has the margin of its class as its gap; a wrong one has a gap too.
    assert {row.attack for row in confidence} == {"clean", "pgd", "smallest-margin"}
    assert all(
        row.top_gap == pytest.approx(row.margin, abs=2e-6) for row in confidence if row.correct
    )
    assert all(
        row.top_gap is not None
        and row.margin is not None
        and 0 <= row.top_gap <= -row.margin + 2e-6
        for row in confidence
        if not row.correct
    )
    html = (finished / "report.html").read_text()
    assert all(
        title in html
        for title in (
            "Accuracy against alpha",
            "Which model an attack on the mixture breaks",
            "Confidence of both models",
        )
    )


@pytest.mark.usefixtures("figures_once")
def test_a_repeated_study_changes_nothing(finished: Path, references: tuple[str, str]) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in finished.rglob("*.*")
        if path.suffix in (".jsonl", ".safetensors", ".json")
    }
    report = (finished / "report.html").read_text()
    assert small_study(finished, references).run().read_text() == report
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_parts_that_need_others(tmp_path: Path, references: tuple[str, str]) -> None:
    for part, needed in (("choose", "train"), ("adversaries", "choose")):
        with pytest.raises(InputError, match=f"must come after the part {needed}"):
            small_study(tmp_path, references).run([part])


@pytest.mark.usefixtures("without_report")
def test_one_part_alone(tmp_path: Path, references: tuple[str, str]) -> None:
    small_study(tmp_path, references).run(["train"])
    assert (tmp_path / "gates" / "C.safetensors").exists()
    assert {row.model for row in read_rows(tmp_path)} == {"accurate", "robust"}


def test_gates_are_trained_with_the_random_seed_of_the_study(
    tmp_path: Path, references: tuple[str, str]
) -> None:
    study = small_study(tmp_path, references)
    study.conditions = replace(study.conditions, seed=4)
    study.train_gate()
    assert read_description(tmp_path / "gates-C" / "run.toml").identity["plan"]["seed"] == 4


def test_folders_of_other_attack_lists_are_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StudySettings()
    identity = AdaptiveSmoothingStudy.identity(settings)
    monkeypatch.setattr("equipoise.studies.adaptive_smoothing.ADAPTIVE_VERSION", 0)
    assert AdaptiveSmoothingStudy.identity(settings) != identity


def test_epochs_of_gates_that_are_given() -> None:
    given, default = StudySettings(size="full", gate_epochs=3), StudySettings(size="full")
    sizes = [AdaptiveSmoothingStudy.size_for(settings) for settings in (given, default)]
    assert [size.gate_plan.epochs for size in sizes] == [3, 10]
    assert [size.ablation_plan.epochs for size in sizes] == [1, 1]
    identities = [AdaptiveSmoothingStudy.identity(settings) for settings in (given, default)]
    assert identities[0].pop("gate_epochs") == 3 and identities[0] == identities[1]


def test_the_smoke_size_has_its_own_epochs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`gate_epochs` must be left out for the smoke size"):
        reproduce("adaptive-smoothing", out=tmp_path / "run", gate_epochs=3)
