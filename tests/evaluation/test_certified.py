from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import pgd
from equipoise.certification import ABSTAIN, Engine, SmoothingPlan, mixture
from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.data import Dataset
from equipoise.evaluation import certified as room
from equipoise.evaluation import certified_summary, diagnosis
from equipoise.evaluation.certificate_check import CrossCheck
from equipoise.evaluation.certified import CertificationConditions, CertificationJob, certified
from equipoise.evaluation.diagnosis import Diagnosis
from equipoise.models.tta import TTAClassifier

PLAN = SmoothingPlan(0.1, samples=120, n0=20, failure=0.01)
TERMS = CertificationConditions(PLAN, torch.device("cpu"), batch_size=50)


class Brightness(nn.Module):
    """Three classes by the mean of the image: its smoothed version is robust, and classes differ in size."""

    def forward(self, x: Tensor) -> Tensor:
        centres = torch.tensor([0.3, 0.5, 0.7], device=x.device, dtype=x.dtype)
        mean = x.flatten(1).mean(dim=1, keepdim=True)
        return 400 * (2 * mean * centres - centres**2)


def data(count: int = 10) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    level = torch.randint(40, 216, (count, 1, 1, 1), generator=chance)
    images = (level + torch.randint(-20, 21, (count, 1, 5, 7), generator=chance)).clamp(0, 255).to(torch.uint8)
    labels = Brightness()(images / 255).argmax(dim=1)
    labels[0] = (labels[0] + 1) % 3
    return Dataset("made", "test", images, labels, torch.arange(count) + 50, tuple("abc"))


def subject(accurate: bool = False) -> CertificationJob:
    return CertificationJob("m", Brightness(), Brightness() if accurate else None)


def test_rows_and_results(tmp_path: Path) -> None:
    results = certified([subject()], data(), TERMS, tmp_path / "run")
    rows = records.read(tmp_path / "run")
    assert [row["index"] for row in rows] == list(range(50, 60)) and {row["attack"] for row in rows} == {"certify"}
    radii = np.array([row["radius"] if row["correct"] else 0 for row in rows])
    assert all((row["predicted"] == ABSTAIN) == (row["radius"] == 0) for row in rows)
    assert all(row["correct"] == (row["predicted"] == row["label"]) for row in rows)
    assert not rows[0]["correct"] and sum(row["correct"] for row in rows) > 4
    assert summary.value(results, "m", "acr") == pytest.approx(radii.mean())
    assert summary.value(results, "m", "certified@0.00") == (radii > 0).mean()
    assert summary.value(results, "m", "certified@0.25") == (radii >= 0.25).mean()
    assert summary.value(results, "m", "abstained") == np.mean([row["predicted"] == ABSTAIN for row in rows])
    assert summary.value(results, "m", "samples") == 140
    assert all(math.isfinite(row["low"]) and row["low"] <= row["value"] <= row["high"] for row in results)
    told = records.summary(tmp_path / "run")
    assert told["verb"] == "certify" and told["results"] == json.loads(json.dumps(results))


def test_the_same_weights_with_other_looks_are_another_run(tmp_path: Path) -> None:
    certified([CertificationJob("m", TTAClassifier(Brightness(), 2))], data(), TERMS, tmp_path / "run")
    with pytest.raises(InputError, match="models"):
        certified([CertificationJob("m", TTAClassifier(Brightness(), 6))], data(), TERMS, tmp_path / "run")


def test_resumes_and_shards_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the first pool, repeated: the same rows; and pools of another size give them too."""
    whole = certified([subject()], data(), TERMS, tmp_path / "whole")
    monkeypatch.setattr(room, "_POOL", {"cpu": 3 * PLAN.samples})
    made = room.rows_for
    calls = []

    def stop_after_one(*arguments: object) -> list[records.Row]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "rows_for", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        certified([subject()], data(), TERMS, tmp_path / "parts")
    assert len(records.read(tmp_path / "parts")) == 3
    assert certified([subject()], data(), TERMS, tmp_path / "parts") == whole
    assert len(calls) == 5, "four pools, the first of which was not done again"
    assert records.read(tmp_path / "parts") == records.read(tmp_path / "whole")


@pytest.mark.parametrize("change", [{"sigma": 0.2}, {"samples": 200}, {"failure": 0.02}, {"tolerance": 0.1},
                                    {"sound": True}, {"alpha": 0.9}])
def test_another_plan_is_another_run(tmp_path: Path, change: dict[str, float]) -> None:
    certified([subject()], data(3), TERMS, tmp_path / "run")
    with pytest.raises(InputError, match="`out` must be a new folder"):
        certified([subject()], data(3), replace(TERMS, plan=replace(PLAN, **change)), tmp_path / "run")  # type: ignore[arg-type]


def test_batch_size_may_differ(tmp_path: Path) -> None:
    results = certified([subject()], data(3), TERMS, tmp_path / "run")
    assert certified([subject()], data(3), replace(TERMS, batch_size=7), tmp_path / "run") == results


def test_a_mixture(tmp_path: Path) -> None:
    terms = replace(TERMS, plan=replace(PLAN, alpha=0.8))
    results = certified([subject(accurate=True)], data(), terms, tmp_path / "run")
    plain = certified([subject()], data(), TERMS, tmp_path / "plain")
    rows, alone = records.read(tmp_path / "run"), records.read(tmp_path / "plain")
    assert all(row["alpha"] == 0.8 for row in rows) and all(row["alpha"] == 0.8 for row in results)
    for row, other in zip(rows, alone, strict=True):
        assert row["lower"] == other["lower"] and row["radius"] <= other["radius"]
        assert row["predicted"] in (ABSTAIN, row["answer"])
    assert summary.value(results, "m", "acr") < summary.value(plain, "m", "acr")
    assert summary.value(results, "m", "clean") >= summary.value(results, "m", "certified@0.00")
    base = mixture.Base.of_rows(rows, 0.1)
    assert np.allclose(np.floor(1e6 * base.radius(0.8)) / 1e6,
                       [row["radius"] if row["correct"] else 0 for row in rows], atol=2e-5)
    assert mixture.clean_accuracy(base, 1.0) >= 0.8


def test_cross_check_finds_nothing_against_honest_certificates(tmp_path: Path) -> None:
    look = CrossCheck(partial(pgd, steps=3), "pgd")
    results = certified([subject()], data(6), TERMS, tmp_path / "run", [look])
    told = next(row for row in results if row["metric"] == "broken-pgd")
    rows = [row for row in records.read(tmp_path / "run") if row["attack"] == "break-pgd"]
    assert told["broken"] == 0 and told["sound"] and told["n"] == len(rows) > 2
    assert all(row["distance"] <= row["radius"] for row in rows)
    assert certified([subject()], data(6), TERMS, tmp_path / "run", [look]) == results


@pytest.mark.parametrize("accurate", [False, True])
def test_cross_check_exposes_false_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                accurate: bool) -> None:
    """Radii ten times too large must not pass."""
    honest = room.rows_for

    def boast(subject: CertificationJob, batch: Dataset, terms: CertificationConditions, engine: Engine) -> list[records.Row]:
        return [{**row, "radius": 10 * row["radius"]} for row in honest(subject, batch, terms, engine)]

    monkeypatch.setattr(room, "rows_for", boast)
    terms = replace(TERMS, plan=replace(PLAN, alpha=0.9 if accurate else 1.0))
    results = certified([subject(accurate)], data(6), terms, tmp_path / "run", [CrossCheck(pgd, "pgd")])
    told = next(row for row in results if row["metric"] == "broken-pgd")
    assert told["broken"] > told["allowed"] and not told["sound"]


def test_cross_check_allows_for_images_that_abstained() -> None:
    """At p = ½ a certificate is rare and always wrong: honest ones must pass, though all that exist are broken."""
    tried: list[records.Row] = [{"index": i, "model": "m", "attack": "certify"} for i in range(10_000)]
    broken: list[records.Row] = [{"index": i, "model": "m", "attack": "break-pgd", "correct": False} for i in range(90)]
    told, = CrossCheck(pgd, "pgd").results(tried + broken, TERMS)
    assert told["n"] == told["broken"] == 90 and told["sound"] and 200 < told["allowed"] < 250
    told, = CrossCheck(pgd, "pgd").results(tried[:100] + broken, TERMS)
    assert not told["sound"]


def test_too_few_samples_for_any_radius(tmp_path: Path) -> None:
    """Three votes cannot lift a bound above one half: an ACR of 0 within [0, 0]."""
    terms = replace(TERMS, plan=SmoothingPlan(0.1, samples=3, n0=1, failure=0.001))
    told = certified([subject()], data(3), terms, tmp_path / "run")[0]
    assert told["metric"] == "acr" and told["low"] == told["value"] == told["high"] == 0


def test_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_STEPS", 3)
    look = Diagnosis(at=(0.0, 0.5))
    results = certified([subject()], data(4), TERMS, tmp_path / "run", [look])
    assert summary.value(results, "m", "true@0.50") <= summary.value(results, "m", "true@0.00")
    assert summary.value(results, "m", "off@0.50") >= summary.value(results, "m", "off@0.00")
    ratios = [row["ratio"] for row in records.read(tmp_path / "run") if row["attack"] == "mixing-ratio"]
    assert len(ratios) == 4 and all(ratio is None or 0 < ratio <= 1 for ratio in ratios)
    assert certified([subject()], data(4), TERMS, tmp_path / "run", [look]) == results


@pytest.mark.parametrize("value", [0.123456789, 1.9999999, 0.3, 0.0, 1e-7])
def test_radii_are_never_rounded_up(value: float) -> None:
    assert certified_summary.down(value) <= value + 1e-12 and value - certified_summary.down(value) < 1.001e-6
