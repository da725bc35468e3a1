"""The study of local smoothing, with two untrained networks and a few digits."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_pair import conditions, study_run, untrained_pair
from small_pair import without_report as without_report

from conftest import draw_figures_once
from equipoise.core.arrays import GradientArrays
from equipoise.core.checks import InputError
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.local_smoothing.policy import TARGETS
from equipoise.studies.local_smoothing import LOSSES, LocalSmoothingStudy, LocalStudySize
from equipoise.training import TrainingPlan

TINY = LocalStudySize(
    neighbours=(1, 3),
    weighted_neighbours=(3,),
    neighbour_gammas=(0.1, 10.0),
    weights=(0.5,),
    steps=2,
    long_steps=(2,),
    policy_width=2,
    policy_images=16,
    eps_factors=(0.5, 1.5),
    theorem_neighbours=3,
    theorem_gammas=(1.0,),
    theorem_factors=(1e-3, 0.1),
    theorem_images=2,
    suite="fast",
    suite_images=2,
    batch_size=8,
    policy_plan=TrainingPlan(epochs=1, batch_size=8, optimizer="adamw", lr=1e-3, held_out=0),
    loss_plan=TrainingPlan(epochs=1, batch_size=16, optimizer="adamw", lr=1e-3, held_out=0),
)


def small_study(folder: Path) -> LocalSmoothingStudy:
    return LocalSmoothingStudy(
        study_run(folder, "local-smoothing"), untrained_pair(), TINY, conditions()
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of which every part was run."""
    folder = tmp_path_factory.mktemp("local-smoothing")
    with pytest.MonkeyPatch.context() as patch:
        draw_figures_once(patch)
        small_study(folder).run()
    return folder


def test_every_part_has_rows(finished: Path) -> None:
    assert {row.model for row in read_rows(finished)} == {"accurate", "robust", "adaptive"}
    trust = {row.model for row in read_rows(finished / "trust")}
    assert trust >= {"constant, probabilities", "ratio, logits", "accurate"}
    targets = read_rows(finished / "targets")
    assert len(targets) == 6 * 3 * len(TARGETS) and {row.model for row in targets} == {
        "accurate",
        "robust",
        "adaptive",
    }
    assert {row.attack for row in read_rows(finished / "auto")} == {"clean", "auto"}
    assert {row.attack for row in read_rows(finished / "theorems")} == {"theorem-1", "theorem-2"}
    assert all(result.is_estimate for result in read_summary(finished / "theorems").results)
    assert {row.model for row in read_rows(finished / "losses")} == set(LOSSES.values())
    assert {row.attack for row in read_rows(finished / "radii")} == {
        "eps 0.05",
        "eps 0.1",
        "eps 0.15",
    }
    assert GradientArrays.load(finished) is not None


def test_softened_attacks_on_rules_with_neighbours_of_finite_strength(finished: Path) -> None:
    softened = {
        (row.model, row.alpha is not None and row.alpha < 1)
        for row in read_rows(finished / "neighbours")
        if row.attack == "pgd-soft"
    }
    assert softened == {
        ("1 neighbours, plain", True),
        ("3 neighbours, plain", True),
        ("3 neighbours, distance", True),
    }


def test_the_summary_and_the_report(finished: Path) -> None:
    summary = read_summary(finished)
    assert summary.study == "local-smoothing" and summary.crossing is not None
    assert {row.versus for row in summary.differences if row.model == "adaptive"} == {
        "accurate",
        "robust",
    }
    assert (finished / "report.html").exists()


@pytest.mark.usefixtures("figures_once")
def test_a_repeated_study_changes_nothing(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")}
    report = (finished / "report.html").read_text()
    assert small_study(finished).run().read_text() == report
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")} == before


@pytest.mark.usefixtures("without_report")
def test_an_interrupted_part_ends_with_the_same_rows(tmp_path: Path) -> None:
    small_study(tmp_path).run(["trust"])
    path = tmp_path / "trust" / "rows.jsonl"
    whole = path.read_text().splitlines()
    # Without the rules whose jobs were the first to use attacks that all share.
    remaining = [
        line for line in whole if "constant, logits" not in line and "pgd-soft" not in line
    ]
    path.write_text("\n".join(remaining) + "\n")
    (tmp_path / "trust" / "summary.json").unlink()
    small_study(tmp_path).run(["trust"])
    assert sorted(path.read_text().splitlines()) == sorted(whole)


def test_parts_that_need_the_policy(tmp_path: Path) -> None:
    for part in ("radii", "auto"):
        with pytest.raises(InputError, match="must come after the part policy"):
            small_study(tmp_path).run([part])


@pytest.mark.usefixtures("without_report")
def test_one_part_alone(tmp_path: Path) -> None:
    small_study(tmp_path).run(["gradients"])
    assert GradientArrays.load(tmp_path) is not None and not (tmp_path / "trust").exists()
    assert read_summary(tmp_path).crossing is None
