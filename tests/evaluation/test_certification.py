"""Certification of a data set: rows, resuming, identity, and the public function."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brightness_models import CONDITIONS, PLAN, Brightness, brightness_images, job
from torch import nn

from equipoise.certification import ABSTAIN
from equipoise.certification.mixture import SmoothedBase
from equipoise.core.checks import InputError
from equipoise.core.records import read_rows
from equipoise.core.results import find, read_summary
from equipoise.core.rows import CertificateRow, certificates
from equipoise.evaluation.certificates import CertificationJob, round_down
from equipoise.evaluation.certifier import certify, run_certification
from equipoise.models import TTAClassifier


def test_one_row_per_image(tmp_path: Path) -> None:
    _, rows = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    own = certificates(rows, "m")
    assert rows == read_rows(tmp_path / "run") == own and [row.index for row in own] == list(
        range(50, 60)
    )
    assert all((row.predicted == ABSTAIN) == (row.radius == 0) for row in own)
    assert all(row.correct == (row.predicted == row.label) and row.sigma == 0.1 for row in own)
    assert not own[0].correct and sum(row.correct for row in own) > 4


def test_the_summary_is_written(tmp_path: Path) -> None:
    summary, _ = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "run")
    stored = read_summary(tmp_path / "run")
    assert stored.command == "certify" and stored.results == summary.results


def test_other_settings_of_the_same_weights_are_another_run(tmp_path: Path) -> None:
    jobs = [[CertificationJob("m", TTAClassifier(Brightness(), views), PLAN)] for views in (2, 6)]
    run_certification(jobs[0], brightness_images(), CONDITIONS, tmp_path / "run")
    with pytest.raises(InputError, match="models"):
        run_certification(jobs[1], brightness_images(), CONDITIONS, tmp_path / "run")


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """Interrupted in its second batch of three images, and repeated with the same rows as one
    uninterrupted run."""
    conditions, images = replace(CONDITIONS, images_per_write=3), brightness_images()
    summary, rows = run_certification([job()], images, CONDITIONS, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_certification([job(stop_at=15)], images, conditions, tmp_path / "parts")
    assert len(read_rows(tmp_path / "parts")) == 3
    resumed = job()
    again, merged = run_certification([resumed], images, conditions, tmp_path / "parts")
    assert again.results == summary.results and merged == rows
    complete = job()
    run_certification([complete], images, conditions, tmp_path / "complete")
    assert isinstance(resumed.model, Brightness) and isinstance(complete.model, Brightness)
    assert resumed.model.calls < complete.model.calls, "the first batch is not computed again"


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": 0.2},
        {"samples": 200},
        {"failure": 0.02},
        {"tolerance": 0.1},
        {"sound": True},
        {"alpha": 0.9},
    ],
)
def test_another_plan_is_another_run(tmp_path: Path, change: dict[str, Any]) -> None:
    run_certification([job()], brightness_images(3), CONDITIONS, tmp_path / "run")
    with pytest.raises(InputError, match="`out` must be a new folder"):
        run_certification(
            [job(replace(PLAN, **change))], brightness_images(3), CONDITIONS, tmp_path / "run"
        )


def test_batch_size_may_differ(tmp_path: Path) -> None:
    first, _ = run_certification([job()], brightness_images(3), CONDITIONS, tmp_path / "run")
    second, _ = run_certification(
        [job()], brightness_images(3), replace(CONDITIONS, batch_size=7), tmp_path / "run"
    )
    assert first.results == second.results


def test_a_mixture_certifies_less_than_its_smoothed_base(tmp_path: Path) -> None:
    mixed, rows = run_certification(
        [job(replace(PLAN, alpha=0.8), mixed=True)],
        brightness_images(),
        CONDITIONS,
        tmp_path / "mixed",
    )
    alone, other_rows = run_certification(
        [job()], brightness_images(), CONDITIONS, tmp_path / "alone"
    )
    assert all(row.alpha == 0.8 for row in rows) and all(
        result.alpha == 0.8 for result in mixed.results
    )
    for row, other in zip(certificates(rows), certificates(other_rows), strict=True):
        assert row.lower == other.lower and row.radius <= other.radius
        assert row.predicted in (ABSTAIN, row.answer)
    assert find(mixed.results, "m", "acr").value < find(alone.results, "m", "acr").value
    assert (
        find(mixed.results, "m", "clean").value >= find(mixed.results, "m", "certified@0.00").value
    )


def test_the_radii_of_a_mixture_follow_from_its_rows(tmp_path: Path) -> None:
    _, rows = run_certification(
        [job(replace(PLAN, alpha=0.8), mixed=True)],
        brightness_images(),
        CONDITIONS,
        tmp_path / "run",
    )
    base = SmoothedBase.of_rows(certificates(rows))
    assert np.allclose(
        np.floor(1e6 * base.radius(0.8)) / 1e6,
        [row.radius if row.correct else 0 for row in certificates(rows)],
        atol=2e-5,
    )
    assert base.clean_accuracy(1.0) >= 0.8


def test_randomized_bounds_certify_more_from_the_same_votes(tmp_path: Path) -> None:
    _, usual = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "usual")
    randomized = job(replace(PLAN, randomized=True))
    _, rows = run_certification([randomized], brightness_images(), CONDITIONS, tmp_path / "run")
    pairs = list(zip(certificates(rows), certificates(usual), strict=True))
    assert all(row.lower >= other.lower - 1e-9 and row.top == other.top for row, other in pairs)
    assert sum(row.lower > other.lower + 1e-4 for row, other in pairs) > 4


def test_names_must_differ(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`models` must be different"):
        run_certification([job(), job()], brightness_images(4), CONDITIONS, tmp_path / "run")


def test_an_incompatible_model_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`odd` must"):
        run_certification(
            [CertificationJob("odd", nn.Conv2d(3, 4, 1), PLAN)],
            brightness_images(4),
            CONDITIONS,
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [0.123456789, 1.9999999, 0.3, 0.0, 1e-7])
def test_radii_are_never_rounded_up(value: float) -> None:
    assert round_down(value) <= value + 1e-12 and value - round_down(value) < 1.001e-6


def test_radii_just_below_six_decimals_are_never_rounded_up() -> None:
    below = [math.nextafter(number / 1e6, 0) for number in range(1, 3_000_000, 997)]
    assert all(value - 1.001e-6 < round_down(value) <= value for value in below)


def test_certify_a_module_without_a_folder() -> None:
    certification = certify(
        Brightness(), brightness_images(4), sigma=0.1, samples=100, n0=20, device="cpu"
    )
    assert certification.out is None and certification.result("model", "samples").value == 120
    assert [type(row) for row in certification.rows] == [CertificateRow] * 4
    assert "Certified on 4 images, σ = 0.1" in " ".join(str(certification).split())
    assert certification.to_dict()["command"] == "certify"


def test_certify_equals_its_parts(tmp_path: Path) -> None:
    certification = certify(
        {"m": Brightness()},
        brightness_images(),
        sigma="0.1",
        samples=120,
        n0=20,
        failure=0.01,
        device="cpu",
        batch_size=50,
        out=tmp_path / "function",
    )
    summary, rows = run_certification([job()], brightness_images(), CONDITIONS, tmp_path / "parts")
    assert certification.rows == rows and certification.results == summary.results


def test_one_model_with_several_sigmas() -> None:
    certification = certify(
        {"m": Brightness()}, brightness_images(4), sigma=[0.05, 0.1], samples=100, device="cpu"
    )
    assert {(row.model, row.sigma) for row in certificates(certification.rows)} == {
        ("m (sigma 0.05)", 0.05),
        ("m (sigma 0.1)", 0.1),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": [0.1, 0.2, 0.3]}, "`sigma` must be one, or one for each of the 2 models"),
        ({"sigma": "much"}, "`sigma` must be a number"),
        ({"sigma": 0.1, "alpha": 0.8}, "`accurate` must be given together with `alpha`"),
        (
            {"sigma": 0.1, "accurate": Brightness(), "clean": 0.5},
            "`selection_images` must be given with `clean`",
        ),
        ({"sigma": 0.1, "norm": "linf"}, "`norm` must be l2"),
        ({"sigma": 0.1, "certificate": "vote"}, "`certificate` must be one of"),
    ],
)
def test_mistakes_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify([Brightness(), Brightness()], brightness_images(4), device="cpu", **settings)
