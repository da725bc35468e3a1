"""Confidences of smoothed classifiers at adversarial images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from brightness_models import CONDITIONS, PLAN, Brightness, brightness_images, job

from equipoise.core.checks import InputError
from equipoise.core.results import find
from equipoise.core.rows import ConfidenceRow, MixingRatioRow
from equipoise.evaluation.certifier import CertificationSettings, run_certification
from equipoise.evaluation.diagnosis import Diagnosis

DIAGNOSIS = Diagnosis(at=(0.0, 0.5), steps=3)


def test_confidence_falls_under_attack(tmp_path: Path) -> None:
    summary, rows = run_certification(
        [job()], brightness_images(4), CONDITIONS, tmp_path / "run", diagnosis=DIAGNOSIS
    )
    value = {
        metric: find(summary.results, "m", metric).value
        for metric in ("true@0.00", "true@0.50", "off@0.00", "off@0.50")
    }
    assert value["true@0.50"] <= value["true@0.00"] and value["off@0.50"] >= value["off@0.00"]
    assert sum(isinstance(row, ConfidenceRow) for row in rows) == 8


def test_misclassified_images_move_too(tmp_path: Path) -> None:
    """With false labels every image is misclassified; the confidence in them must still fall with
    the radius."""
    images = brightness_images(6)
    images = replace(images, labels=(images.labels + 1) % 3)
    diagnosis = Diagnosis(at=(0.0, 0.6), far=0.7, steps=5)
    _, rows = run_certification(
        [job(replace(PLAN, sigma=0.8))], images, CONDITIONS, tmp_path / "run", diagnosis=diagnosis
    )
    confidence = {(row.index, row.attack): row for row in rows if isinstance(row, ConfidenceRow)}
    before, after = (
        [confidence[index, f"confidence-at@{radius}"] for index in images.index.tolist()]
        for radius in ("0.00", "0.60")
    )
    pairs = [
        (first, second) for first, second in zip(before, after, strict=True) if first.true > 0.02
    ]
    assert not any(row.correct for row in before) and len(pairs) > 1
    assert all(second.true < first.true for first, second in pairs), (
        "an image that stays has the same confidence"
    )


def test_every_image_has_a_mixing_ratio_row(tmp_path: Path) -> None:
    _, rows = run_certification(
        [job()], brightness_images(4), CONDITIONS, tmp_path / "run", diagnosis=DIAGNOSIS
    )
    ratios = [row.ratio for row in rows if isinstance(row, MixingRatioRow)]
    assert len(ratios) == 4 and all(ratio is None or 0 < ratio <= 1 for ratio in ratios)


def test_a_finished_diagnosis_is_not_repeated(tmp_path: Path) -> None:
    first, _ = run_certification(
        [job()], brightness_images(4), CONDITIONS, tmp_path / "run", diagnosis=DIAGNOSIS
    )
    resumed = job()
    second, _ = run_certification(
        [resumed], brightness_images(4), CONDITIONS, tmp_path / "run", diagnosis=DIAGNOSIS
    )
    assert first.results == second.results
    assert isinstance(resumed.model, Brightness) and resumed.model.calls == 1, (
        "only the check of the model"
    )


def test_radii_of_the_diagnosis_are_a_setting() -> None:
    settings = CertificationSettings(sigma="0.5", diagnose=True, diagnose_radii="0,1,2,3,4,5")
    assert settings.diagnosis() == Diagnosis(at=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert CertificationSettings(sigma="0.5").diagnosis() is None
    assert CertificationSettings(sigma="0.5", diagnose=True).diagnosis() == Diagnosis()
    for radii in ("1,-2", "1,1", "1,1.001", "", "a"):
        with pytest.raises(InputError, match="`diagnose_radii`"):
            CertificationSettings(sigma="0.5", diagnose_radii=radii)
