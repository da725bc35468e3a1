"""Evaluations with the attack `minimum-norm`: radii in rows, curves in summary and report,
resuming, mixtures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from killed_runs import run_until_killed
from small_models import SmallNet, linear_model, random_images

import equipoise as eq
from equipoise import reporting
from equipoise.attacks import MinimumNorm
from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.core.threat import NORMS, Threat
from equipoise.data import pixels
from equipoise.evaluation import Evaluation, evaluate
from equipoise.mixing import MixedClassifier

EPS = {"linf": 0.02, "l2": 0.2, "l1": 0.8}
SHORT: dict[str, Any] = {"attack": "minimum-norm", "steps": 6, "restarts": 2}


def run(model: Any, norm: str = "linf", out: Path | None = None, **settings: Any) -> Evaluation:
    data = random_images(labels_of=SmallNet())
    return evaluate(
        {"m": model},
        data,
        threat=Threat(norm, EPS[norm]),
        out=out,
        device="cpu",
        **{**SHORT, "batch_size": 4, **settings},
    )


@pytest.mark.parametrize("norm", NORMS)
def test_radii_of_rows_curve_and_saved_images(tmp_path: Path, norm: str) -> None:
    model = SmallNet().eval()
    result = run(model, norm, tmp_path, save_adversarial=True)
    rows = {
        row.index: row
        for row in result.rows
        if isinstance(row, AttackRow) and row.attack == "minimum-norm"
    }
    radii = {index: math.inf if row.radius is None else row.radius for index, row in rows.items()}
    clean = {
        row.index: row.correct
        for row in result.rows
        if isinstance(row, AttackRow) and row.attack == "clean"
    }
    assert all((radii[index] == 0) == (not clean[index]) for index in rows)
    assert all(
        row.correct == (row.radius is None) and row.max_radius == EPS[norm] for row in rows.values()
    )
    assert 0 < sum(map(math.isinf, radii.values())) < len(radii), "some images survive, some do not"
    (curve,) = result.radius_curves
    assert all(
        point.value == sum(radius > point.radius for radius in radii.values()) / 11
        for point in curve.points
    )
    assert curve.points[-1].value == result.result("m", "minimum-norm").value
    assert read_summary(tmp_path).radius_curves == (curve,)
    stored = safetensors.torch.load_file(tmp_path / "adversarial.safetensors")
    x, x_adv = pixels(random_images().images).double(), stored["m/minimum-norm/images"]
    sizes, predicted = (
        geometry.size(x_adv.double() - x, norm).tolist(),
        model(x_adv).argmax(dim=1).tolist(),
    )
    for index, size, label in zip(stored["index"].tolist(), sizes, predicted, strict=True):
        if rows[index].radius is not None:
            assert (
                size == pytest.approx(rows[index].radius, rel=1e-9) and label != rows[index].label
            )
    assert "median" in str(result) and f"{curve.survived} not up to" in str(result)
    report = reporting.report(tmp_path).read_text(encoding="utf-8")
    assert (
        "Accuracy against radius" in report
        and (tmp_path / "figures" / "radius-curves.svg").exists()
    )


@pytest.mark.parametrize("writes", [1, 3, 5])
def test_a_killed_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    model = SmallNet().eval()
    whole = run(model)
    run_until_killed(monkeypatch, writes, lambda: run(model, out=tmp_path))
    resumed = run(model, out=tmp_path)
    assert sorted(map(str, resumed.rows)) == sorted(map(str, whole.rows))
    assert resumed.radius_curves == whole.radius_curves


def test_a_mixture_with_its_bases_and_adaptive_gradients() -> None:
    mixture = MixedClassifier(linear_model(0), linear_model(1), alpha=0.5)
    result = evaluate(mixture, random_images(6), threat=Threat("linf", 0.05), device="cpu", **SHORT)
    curves = {curve.model: curve for curve in result.radius_curves}
    assert list(curves) == ["accurate", "robust", "mixed"]
    for name, curve in curves.items():
        assert curve.points[-1].value == result.result(name, "worst").value
        assert curve.points[0].value == result.result(name, "clean").value


def test_several_attacks_and_attack_objects() -> None:
    model = SmallNet().eval()
    both, alone = (
        run(model, attack="pgd,minimum-norm"),
        run(model, attack=MinimumNorm(6, 5, 2), steps=None, restarts=None),
    )
    assert both.radius_curves == alone.radius_curves == run(model).radius_curves
    assert run(model, attack="pgd").radius_curves == ()
    with pytest.raises(InputError, match="`repeats` must be left out for minimum-norm"):
        run(model, repeats=3)


def test_radii_of_tensors() -> None:
    model, data, threat = (
        SmallNet().eval(),
        random_images(labels_of=SmallNet()),
        Threat("linf", EPS["linf"]),
    )
    attacked = eq.attack(model, (pixels(data.images), data.labels), threat=threat, **SHORT)
    radii = [
        row.radius
        for row in run(model, batch_size=128).rows
        if isinstance(row, AttackRow) and row.attack == "minimum-norm"
    ]
    assert isinstance(attacked.radii, torch.Tensor)
    own = attacked.radii.tolist()
    assert [radius == 0 for radius in own] == [radius == 0 for radius in radii]
    assert [math.isinf(radius) for radius in own] == [radius is None for radius in radii]
    pgd = eq.attack(model, data, threat=threat, attack="pgd", steps=6).radii
    assert bool((attacked.radii <= pgd + 1e-6).all()), "another attack breaks nothing with less"
    with pytest.raises(InputError, match="`distance` must be known"):
        _ = replace(attacked, distance=None).radii
