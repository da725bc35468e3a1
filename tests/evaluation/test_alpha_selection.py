"""Alpha for a clean accuracy, and the frontier over alpha and sigma."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from brightness_models import CONDITIONS, Threshold, threshold_images

from equipoise.certification import SmoothingPlan
from equipoise.certification.mixture import SmoothedBase
from equipoise.core.checks import InputError
from equipoise.core.results import Summary, find
from equipoise.core.rows import CERTIFY, SELECT_ALPHA, Row, certificates
from equipoise.evaluation.certificates import CertificationJob, CleanTarget, other_images
from equipoise.evaluation.certifier import certify, run_certification

PLAN = SmoothingPlan(0.15, samples=200, n0=20, failure=0.01)
IMAGES = threshold_images().take(threshold_images().index % 2 == 0)
OTHERS = other_images(threshold_images(), IMAGES)
TARGET = CleanTarget(0.95, OTHERS)


def jobs() -> list[CertificationJob]:
    """The smoothed models are wrong near the boundary, the accurate one is correct everywhere."""
    return [
        CertificationJob(f"s{sigma}", Threshold(0.08), replace(PLAN, sigma=sigma), Threshold())
        for sigma in (0.1, 0.3)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, list[Row]]:
    return run_certification(
        jobs(), IMAGES, CONDITIONS, tmp_path_factory.mktemp("alpha") / "run", target=TARGET
    )


def test_other_images_are_evenly_spread_over_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OTHERS.index.tolist() == list(range(1, 40, 2))
    monkeypatch.setattr("equipoise.evaluation.certificates.LEAST_OTHERS", 5)
    few = other_images(threshold_images(), IMAGES.slice(0, 5))
    assert few.index.tolist() == [1, 12, 19, 26, 33]


def test_some_images_must_be_left() -> None:
    with pytest.raises(InputError, match="`count` must leave images"):
        other_images(IMAGES, IMAGES)


def test_alpha_is_selected_on_the_other_images(run: tuple[Summary, list[Row]]) -> None:
    summary, rows = run
    assert {row.index for row in certificates(rows, measurement=SELECT_ALPHA)} == set(
        OTHERS.index.tolist()
    )
    for selected in summary.selected_alphas:
        base = SmoothedBase.of_rows(certificates(rows, selected.model, SELECT_ALPHA))
        assert selected.alpha == base.largest_alpha(0.95) and selected.clean_estimate >= 0.95
    assert [selected.sigma for selected in summary.selected_alphas] == [0.1, 0.3]
    assert summary.selected_alphas[0].alpha < 1


def test_the_selected_alpha_is_certified(run: tuple[Summary, list[Row]]) -> None:
    summary, rows = run
    for selected in summary.selected_alphas:
        own = certificates(rows, selected.model, CERTIFY)
        assert {(row.alpha, row.sigma) for row in own} == {(selected.alpha, selected.sigma)}
        assert find(summary.results, selected.model, "clean-estimate").value >= 0.9


def test_the_frontier_is_the_best_mixture_at_every_radius(run: tuple[Summary, list[Row]]) -> None:
    summary, _ = run
    assert [point.radius for point in summary.frontier] == [
        0.25 * i for i in range(len(summary.frontier))
    ]
    for point in summary.frontier:
        values = [
            result.value
            for result in summary.results
            if result.metric == f"certified@{point.radius:.2f}"
        ]
        assert point.value == max(values)


def test_a_finished_run_draws_no_new_samples(tmp_path: Path) -> None:
    first, _ = run_certification(jobs(), IMAGES, CONDITIONS, tmp_path / "run", target=TARGET)
    resumed = jobs()
    second, _ = run_certification(resumed, IMAGES, CONDITIONS, tmp_path / "run", target=TARGET)
    assert first.results == second.results and first.frontier == second.frontier
    assert [job.model.calls for job in resumed] == [1, 1], "only the check of the model"


def test_another_target_is_another_run(tmp_path: Path) -> None:
    run_certification(jobs()[:1], IMAGES, CONDITIONS, tmp_path / "run", target=TARGET)
    with pytest.raises(InputError, match=r"clean_target\.clean"):
        run_certification(
            jobs()[:1], IMAGES, CONDITIONS, tmp_path / "run", target=replace(TARGET, clean=0.9)
        )


def test_a_model_that_cannot_reach_the_target_is_excluded(tmp_path: Path) -> None:
    bad = CertificationJob("bad", Threshold(0.3), PLAN, Threshold(0.3))
    summary, _ = run_certification(
        [*jobs(), bad], IMAGES, CONDITIONS, tmp_path / "run", target=TARGET
    )
    assert [selected.model for selected in summary.selected_alphas] == ["s0.1", "s0.3"]
    assert not any(result.model == "bad" for result in summary.results)
    assert [(excluded.model, excluded.n) for excluded in summary.excluded] == [("bad", len(OTHERS))]
    assert summary.excluded[0].most < 0.95


def test_a_target_out_of_reach_for_all_is_one_sentence(tmp_path: Path) -> None:
    bad = CertificationJob("bad", Threshold(0.3), PLAN, Threshold(0.3))
    with pytest.raises(InputError, match="`clean` must be reachable"):
        run_certification([bad], IMAGES, CONDITIONS, tmp_path / "run", target=TARGET)


def test_a_target_is_a_share() -> None:
    with pytest.raises(InputError, match=r"`clean` must lie in \[0, 1\]"):
        CleanTarget(2.0, OTHERS)


def test_certify_selects_alpha_and_prints_the_frontier() -> None:
    certification = certify(
        Threshold(0.08),
        IMAGES,
        sigma="0.1,0.3",
        accurate=Threshold(),
        clean=0.95,
        samples=200,
        n0=20,
        selection_images=threshold_images(),
        device="cpu",
    )
    assert len(certification.summary.selected_alphas) == 2
    assert "Frontier" in str(certification) and "20 other images" in str(certification)
