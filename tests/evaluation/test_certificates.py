from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from brightness_models import CONDITIONS, brightness_images, job

from equipoise.certification import ABSTAIN, SmoothingPlan
from equipoise.core.results import find
from equipoise.evaluation.certificates import certificates
from equipoise.evaluation.certifier import run_certification


def test_metrics_follow_from_the_rows(tmp_path: Path) -> None:
    summary, rows = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    own = certificates(rows)
    radii = np.array([row.radius if row.correct else 0 for row in own])
    expected = {"acr": pytest.approx(radii.mean()), "certified@0.00": (radii > 0).mean(),
                "certified@0.25": (radii >= 0.25).mean(),
                "abstained": np.mean([row.predicted == ABSTAIN for row in own]), "samples": 140}
    for metric, value in expected.items():
        assert find(summary.results, "m", metric).value == value


def test_intervals_contain_their_values(tmp_path: Path) -> None:
    summary, _ = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    assert all(math.isfinite(result.low) and result.low <= result.value <= result.high for result in summary.results)


def test_too_few_samples_for_any_radius(tmp_path: Path) -> None:
    """Three votes cannot raise a bound above one half: an ACR of 0 within [0, 0]."""
    plan = SmoothingPlan(0.1, samples=3, n0=1, failure=0.001)
    summary, _ = run_certification([job(plan)], brightness_images(3), CONDITIONS, tmp_path / "run")
    acr = find(summary.results, "m", "acr")
    assert acr.low == acr.value == acr.high == 0
