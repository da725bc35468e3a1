"""Mixtures certified at several alphas from one run of votes: `certify(..., alphas=…)`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brightness_models import CONDITIONS, PLAN, Brightness, brightness_images, job

from equipoise.certification.mixture import THEOREMS
from equipoise.core.checks import InputError
from equipoise.core.records import read_rows
from equipoise.core.results import find, read_summary
from equipoise.core.rows import CertificateRow, certificates
from equipoise.evaluation.certifier import certify, run_certification

ALPHAS = (0.5, 0.7, 0.9)
SEVERAL = replace(PLAN, alpha=0.9, alphas=ALPHAS)


@pytest.mark.parametrize(
    "change", [{}, {"two_sided": True}, {"tolerance": 0.1}, {"certificate": "soft"}]
)
def test_each_alpha_as_if_it_were_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    """The same rows as a run per alpha, except that with a tolerance the samples suffice for all of
    them."""
    plan = replace(SEVERAL, **change)
    _, rows = run_certification(
        [job(plan, mixed=True)], brightness_images(), CONDITIONS, tmp_path / "several"
    )
    assert [row.key for row in rows] == [
        (index, "m", "certify", alpha) for index in range(50, 60) for alpha in ALPHAS
    ]
    for alpha in ALPHAS:
        own = replace(plan, alpha=alpha, alphas=())
        _, single = run_certification(
            [job(own, mixed=True)], brightness_images(), CONDITIONS, tmp_path / f"{alpha}"
        )
        of_alpha = [row for row in certificates(rows) if row.alpha == alpha]
        if "tolerance" in change:
            assert all(
                row.samples >= other.samples
                for row, other in zip(of_alpha, certificates(single), strict=True)
            )
        else:
            assert of_alpha == single


def test_votes_are_drawn_once(tmp_path: Path) -> None:
    jobs = {plan: job(plan, mixed=True) for plan in (SEVERAL, replace(PLAN, alpha=0.9))}
    calls = []
    for plan, own in jobs.items():
        run_certification([own], brightness_images(), CONDITIONS, tmp_path / str(len(plan.alphas)))
        assert isinstance(own.model, Brightness)
        calls.append(own.model.calls)
    assert calls[0] == calls[1]


def test_a_decided_radius_is_decided_at_every_alpha(tmp_path: Path) -> None:
    """Sampling stops when it may for all: at least as many samples as any alpha needs by itself."""
    plan = replace(SEVERAL, decide_radius=0.05, samples=2000)
    _, rows = run_certification(
        [job(plan, mixed=True)], brightness_images(), CONDITIONS, tmp_path / "several"
    )
    samples = {row.index: row.samples for row in certificates(rows)}
    needed = []
    for alpha in ALPHAS:
        own = replace(plan, alpha=alpha, alphas=())
        _, single = run_certification(
            [job(own, mixed=True)], brightness_images(), CONDITIONS, tmp_path / f"{alpha}"
        )
        needed.append([row.samples for row in certificates(single)])
    most = np.max(needed, axis=0)
    assert (np.array(list(samples.values())) >= most).all() and (
        most > np.min(needed, axis=0)
    ).any()


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    conditions, images = replace(CONDITIONS, images_per_write=3), brightness_images()
    summary, rows = run_certification(
        [job(SEVERAL, mixed=True)], images, CONDITIONS, tmp_path / "whole"
    )
    with pytest.raises(KeyboardInterrupt):
        run_certification(
            [job(SEVERAL, mixed=True, stop_at=15)], images, conditions, tmp_path / "parts"
        )
    assert len(read_rows(tmp_path / "parts")) == 3 * len(ALPHAS)
    again, merged = run_certification(
        [job(SEVERAL, mixed=True)], images, conditions, tmp_path / "parts"
    )
    assert (
        again.results == summary.results and again.theorems == summary.theorems and merged == rows
    )


def test_other_alphas_are_another_run(tmp_path: Path) -> None:
    run_certification(
        [job(SEVERAL, mixed=True)], brightness_images(3), CONDITIONS, tmp_path / "run"
    )
    with pytest.raises(InputError, match=r"`out` must be a new folder.*plan\.alphas"):
        run_certification(
            [job(replace(SEVERAL, alpha=0.7, alphas=(0.5, 0.7)), mixed=True)],
            brightness_images(3),
            CONDITIONS,
            tmp_path / "run",
        )


def test_theorems_side_by_side(tmp_path: Path) -> None:
    result = certify(
        {"m": Brightness()},
        brightness_images(),
        sigma=0.1,
        accurate=Brightness(),
        alphas="0.9,0.5,0.7",
        samples=500,
        device="cpu",
        out=tmp_path / "run",
    )
    theorems = read_summary(tmp_path / "run").theorems
    assert theorems == result.summary.theorems
    acr = {(item.alpha, item.theorem): item.value for item in theorems if item.metric == "acr"}
    assert set(acr) == {(alpha, theorem) for alpha in ALPHAS for theorem in THEOREMS}
    for alpha in ALPHAS:
        own = [item for item in result.results if item.alpha == alpha]
        assert acr[alpha, "ours"] == pytest.approx(find(own, "m", "acr").value, abs=1e-6)
        assert (
            acr[alpha, "ours"] >= acr[alpha, "A.2"]
            and acr[alpha, "ours"] >= acr[alpha, "lipschitz"]
        )
        assert acr[alpha, "lipschitz"] == pytest.approx(2 * acr[alpha, "3.5"], abs=1e-6)
    assert acr[0.5, "ours"] == 0 < acr[0.7, "ours"] < acr[0.9, "ours"]
    printed = str(result)
    assert (
        "for all alphas of an image together" in " ".join(printed.split()) and "Theorem" in printed
    )


def test_printed_results_hold_attacks_and_diagnoses() -> None:
    """In 80 columns: all theorems by alpha, and below them what the attacks found."""
    result = certify(
        {"m": Brightness()},
        brightness_images(3),
        sigma=0.1,
        accurate=Brightness(),
        alphas=(0.7, 0.9),
        samples=200,
        device="cpu",
        attack="pgd",
        diagnose=True,
        diagnose_radii="0,0.5",
    )
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 80
    printed = " ".join(" ".join(lines).split())
    for words in (
        "σ = 0.1",
        "300 samples per image",
        "estimate",
        "smallest",
        "Under attacks",
        "broken-pgd",
        "true@0.50",
    ):
        assert words in printed
    assert printed.count("acr") == 0, "shown by theorem already"


def test_an_attack_at_every_alpha(tmp_path: Path) -> None:
    result = certify(
        {"m": Brightness()},
        brightness_images(4),
        sigma=0.1,
        accurate=Brightness(),
        alphas=(0.7, 0.9),
        samples=200,
        device="cpu",
        attack="pgd",
    )
    certified = [row for row in result.rows if isinstance(row, CertificateRow) and row.radius > 0]
    attacked = [row for row in result.rows if row.attack == "break-pgd"]
    assert {(row.index, row.alpha) for row in attacked} == {
        (row.index, row.alpha) for row in certified
    }
    assert {item.alpha for item in result.results if item.metric == "broken-pgd"} == {
        row.alpha for row in certified
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alphas": "0.4,0.6"}, "`alphas` must lie in"),
        ({"alphas": "0.6,0.6"}, "`alphas` must be different"),
        ({"alphas": (0.6, 0.7), "alpha": 0.8}, "`alphas` must be left out beside"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify(
            Brightness(),
            brightness_images(4),
            sigma=0.1,
            accurate=Brightness(),
            device="cpu",
            **settings,
        )


def test_alphas_need_an_accurate_model() -> None:
    with pytest.raises(InputError, match="`accurate` must be given together with `alphas`"):
        certify(Brightness(), brightness_images(4), sigma=0.1, alphas="0.6,0.7", device="cpu")
