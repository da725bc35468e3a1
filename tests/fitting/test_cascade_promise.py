"""The promise of a cascade over many simulated fits, and which images decide what."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from synthetic_cascade import POPULATION, OneSwitch, calibration_of, population
from torch import Tensor

from equipoise.core.promises import Target
from equipoise.fitting import cascade
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.cascade import CascadeCalibration, StageMargins
from equipoise.mixing.provenance import halves

FITS, N = 300, 250  # N images in each half


@cache
def true_losses(target: Target, fits: int = FITS) -> Tensor:
    """(fits,) the share of the population that each fit loses; 0 where it gives the cascade up."""
    generator, losses = torch.Generator().manual_seed(0), []
    for seed in range(fits):
        drawn = population().take(torch.randint(POPULATION, (2 * N,), generator=generator))
        calibration = calibration_of(replace(drawn, index=torch.arange(2 * N)), target, seed)
        point = calibration.point(target)
        if point is None or calibration.selected is None:
            losses.append(0.0)
            continue
        worst = StageMargins.of(population(), calibration.selected).worst(
            torch.tensor([point[0].first_q])
        )
        losses.append(int((worst <= point[1]).sum()) / POPULATION)
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture
def one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both stages the scale of the switch, which makes simulations fast."""
    monkeypatch.setattr(cascade, "SCALES", (1.0,))


def test_the_first_view_of_the_population_can_lose_images() -> None:
    whole = StageMargins.of(population(), OneSwitch().select(Target(0.08)))
    by_first = (whole.worst(torch.tensor([0.0, 0.3, 1.0])) == -1).double().mean(dim=1)
    assert by_first[0] > by_first[1] > by_first[2] == 0


def check_expectation(losses: Tensor, target: Target) -> None:
    error = 3 * float(losses.std()) / len(losses) ** 0.5
    assert float(losses.mean()) <= target.share + error
    assert float(losses.mean()) >= target.share - 3 / N  # and it is not kept by doing nothing


@pytest.mark.usefixtures("one_scale")
@pytest.mark.parametrize(
    "target", [pytest.param(Target(0.04), marks=pytest.mark.slow), Target(0.08)], ids=str
)
def test_the_promise_in_expectation(target: Target) -> None:
    check_expectation(true_losses(target), target)


@pytest.mark.usefixtures("one_scale")
@pytest.mark.parametrize("target", [Target(0.08, confidence=0.9)], ids=str)
def test_the_promise_with_confidence(target: Target) -> None:
    exceeded = float((true_losses(target) > target.share).double().mean())
    assert exceeded <= 0.1 + 3 * (0.1 * 0.9 / FITS) ** 0.5 and exceeded > 0.02
    assert (
        float((true_losses(Target(0.08)) > target.share).double().mean()) > 0.2
    )  # which expectation alone allows


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.04, 0.08])
def test_the_promise_in_expectation_with_all_scales(share: float) -> None:
    target, fits = Target(share), 400
    losses = true_losses.__wrapped__(target, fits)
    print(
        f"{fits} fits, target {100 * share:g} points: mean loss {100 * float(losses.mean()):.2f}, given up "
        f"{100 * float((losses == 0).double().mean()):.1f} %, exceeded by "
        f"{100 * float((losses > share).double().mean()):.1f} %"
    )
    check_expectation(losses, target)


def test_one_half_selects_and_the_other_sets_the_threshold() -> None:
    logits, target = population().take(torch.arange(400)), Target(0.08)
    search_rows, calibration_rows = halves(logits.index, 0)
    selected, other = (
        calibration_of(changed(logits, rows), target) for rows in (calibration_rows, search_rows)
    )
    original = calibration_of(logits, target)
    assert stages(selected) == stages(original) != stages(other)
    points = selected.point(target), original.point(target)
    assert points[0] is not None and points[1] is not None and points[0][1] != points[1][1]


def changed(logits: CachedLogits, rows: Tensor) -> CachedLogits:
    """With other images in some of the rows."""
    order = torch.arange(len(logits))
    order[rows] = torch.arange(1000, 1000 + len(rows))
    return replace(population().take(order), index=logits.index)


def stages(calibration: CascadeCalibration) -> tuple[object, ...]:
    selected = calibration.selected
    assert selected is not None
    return float(selected.candidate[0]), selected.first_scale, selected.first_q
