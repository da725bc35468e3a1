from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from brightness_models import (
    CONDITIONS,
    PLAN,
    Brightness,
    Threshold,
    brightness_images,
    job,
    threshold_images,
)
from scipy.special import ndtri

from equipoise.certification import ABSTAIN, SmoothingPlan
from equipoise.core.results import find
from equipoise.core.rows import certificates
from equipoise.evaluation.certifier import certify, run_certification


def test_metrics_follow_from_the_rows(tmp_path: Path) -> None:
    summary, rows = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    own = certificates(rows)
    radii = np.array([row.radius if row.correct else 0 for row in own])
    expected = {
        "acr": pytest.approx(radii.mean()),
        "certified@0.00": (radii > 0).mean(),
        "certified@0.25": (radii >= 0.25).mean(),
        "abstained": np.mean([row.predicted == ABSTAIN for row in own]),
        "samples": 140,
    }
    for metric, value in expected.items():
        assert find(summary.results, "m", metric).value == value


def test_intervals_contain_their_values(tmp_path: Path) -> None:
    summary, _ = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    assert all(
        math.isfinite(result.low) and result.low <= result.value <= result.high
        for result in summary.results
    )


def test_intervals_of_randomized_radii_contain_their_values(tmp_path: Path) -> None:
    """Unanimous votes: the randomised bounds exceed the largest one of Clopper and Pearson."""
    black = torch.zeros(10, 1, 5, 7, dtype=torch.uint8)
    dark = replace(brightness_images(), images=black, labels=torch.zeros(10).long())
    plan = SmoothingPlan(0.1, samples=120, n0=20, randomized=True)
    summary, _ = run_certification([job(plan)], dark, CONDITIONS, tmp_path / "run")
    acr = find(summary.results, "m", "acr")
    assert acr.low <= acr.value <= acr.high and acr.value > 0.1 * ndtri(0.001 ** (1 / 120))


def test_too_few_samples_for_any_radius(tmp_path: Path) -> None:
    """Three votes cannot raise a bound above one half: an ACR of 0 within [0, 0]."""
    plan = SmoothingPlan(0.1, samples=3, n0=1, failure=0.001)
    summary, _ = run_certification([job(plan)], brightness_images(3), CONDITIONS, tmp_path / "run")
    acr = find(summary.results, "m", "acr")
    assert acr.low == acr.value == acr.high == 0


@pytest.mark.parametrize("radius", [0.05, 0.125, 0.0123456789])
def test_a_decided_radius_is_all_that_is_reported(tmp_path: Path, radius: float) -> None:
    """With the same answer as the rows, and no average radius, other radii or accuracies that
    nobody waited for."""
    plan = replace(PLAN, decide_radius=radius, samples=1000)
    summary, rows = run_certification(
        [job(plan)], brightness_images(), CONDITIONS, tmp_path / "run"
    )
    certified = [row.correct and row.radius >= radius for row in certificates(rows)]
    metric = f"certified@{radius}"
    assert [result.metric for result in summary.results] == [metric, "samples"]
    assert find(summary.results, "m", metric).value == np.mean(certified) and any(certified)


def test_a_decided_radius_and_its_tables() -> None:
    """Printed, and in the frontier of mixtures: one radius."""
    result = certify(
        {"m": Threshold(0.05)},
        threshold_images().slice(0, 30),
        sigma="0.1,0.3",
        accurate=Threshold(),
        clean=0.9,
        decide_radius=0.07,
        samples=1000,
        n0=20,
        device="cpu",
        selection_images=threshold_images(),
    )
    assert [point.radius for point in result.summary.frontier] == [
        0.07
    ] and result.summary.theorems == ()
    assert {item.metric for item in result.results} == {"certified@0.07", "samples"}
    assert "certified@0.07" in str(result) and "acr" not in str(result)


def test_frontier_and_table_use_one_radius() -> None:
    """Also with bounds on both sides, whose radii are larger."""
    result = certify(
        {"m": Brightness()},
        brightness_images(24),
        sigma=[0.6, 0.8],
        accurate=Brightness(),
        clean=0.5,
        samples=400,
        n0=20,
        failure=0.01,
        two_sided=True,
        device="cpu",
        batch_size=500,
        selection_images=replace(brightness_images(24), index=torch.arange(24)),
    )
    assert len(result.summary.frontier) > 1
    for point in result.summary.frontier:
        values = [
            item.value for item in result.results if item.metric == f"certified@{point.radius:.2f}"
        ]
        assert point.value == max(values)
