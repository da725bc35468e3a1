"""The attack on certified mixtures, on models whose robust radius is known in closed form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scipy.special import ndtri
from small_pair import conditions
from torch import Tensor, nn

from equipoise.attacks import MinimumNorm
from equipoise.certification import SmoothingPlan, certify
from equipoise.core import rng
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow
from equipoise.data import Dataset
from equipoise.studies.mixing_classifiers_attack import (
    CONFIRMED,
    ConfirmedAttack,
    confirm,
    move_misclassified,
)
from equipoise.studies.mixing_classifiers_models import SmoothedModel

SIGMA, PIXELS = 0.1, 16
DISTANCES = (
    0.05,
    0.12,
    0.2,
)  # of the images from the hyperplane on which the mean pixel is one half


class Halves(nn.Module):
    """Class 0 where the mean pixel is below one half, else class 1; smoothed, its robust radius is
    the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(200.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        lead = self.scale * (x.flatten(1).mean(dim=1) - 0.5)
        return torch.stack([-lead, lead], dim=1)


class Constant(nn.Module):
    """Class 1 for every image: the worst accurate model for images of class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        zero = x.flatten(1).sum(dim=1) * 0
        return torch.stack([zero, zero + self.scale], dim=1)


def images_at(distances: tuple[float, ...]) -> Tensor:
    """Uniform grey images of class 0, float64, at these distances from the hyperplane."""
    grey = 0.5 - torch.tensor(distances, dtype=torch.float32) / math.sqrt(PIXELS)
    return grey.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()


def data() -> Dataset:
    images = images_at(DISTANCES)
    return Dataset(
        "greys",
        "test",
        (images * 255).round().to(torch.uint8),
        torch.zeros(len(images), dtype=torch.int64),
        torch.arange(len(images)),
        ("0", "1"),
    )


def true_radius(distance: float, alpha: float) -> float:
    """Where the mixture with the worst accurate model ties: the probability of class 0 is
    1/(2·alpha)."""
    return max(distance - SIGMA * float(ndtri(1 / (2 * alpha))), 0.0)


@pytest.mark.parametrize("alpha", [1.0, 0.8, 0.6])
def test_the_true_radius_lies_between_certificate_and_attack(alpha: float, tmp_path: Path) -> None:
    images, base = data(), SmoothedModel("halves", Halves(), SIGMA)
    run = Run(
        tmp_path, {"command": "evaluate", "part": "attack"}, {}, labels=images.labels_by_index()
    )
    attack = ConfirmedAttack(MinimumNorm(steps=6, targets=1, restarts=2), copies=64, samples=2000)
    attack.measure(base, Constant(), alpha, images, run, conditions())
    rows = [row for row in run.finish() if isinstance(row, AttackRow)]
    assert [row.key for row in rows] == [
        (index, base.name, CONFIRMED, alpha) for index in range(len(images))
    ]
    x = images.images.float() / 255
    plan = SmoothingPlan(SIGMA, alpha, samples=4000)
    certificate = certify(base.model, x, plan=plan, stream=rng.stream(0, "certify", images.index))
    distances = (0.5 - x.flatten(1).mean(dim=1)).double() * math.sqrt(PIXELS)
    for row, certified, distance in zip(
        rows, certificate.radius.tolist(), distances.tolist(), strict=True
    ):
        true = true_radius(distance, alpha)
        assert row.radius is not None and certified <= true <= row.radius
        assert row.radius <= true + 0.35 * SIGMA and (row.predicted, row.correct) == (1, False)


def test_nothing_is_claimed_where_predict_abstains() -> None:
    """The ray ends on the hyperplane, where either class has half of the votes."""
    x, y = images_at((0.1,)), torch.zeros(1, dtype=torch.int64)

    def confirmed(offsets: tuple[float, ...], largest: float) -> tuple[float | None, int]:
        plan = SmoothingPlan(SIGMA, samples=400, failure=1e-6)
        return confirm(
            Halves(),
            None,
            x,
            images_at((0.0,)).__getitem__,
            y,
            plan=plan,
            stream=rng.stream(0, "a", y),
            largest=largest,
            offsets=offsets,
        )[0]

    assert confirmed((0.0,), 1.0) == (None, -1)
    radius, predicted = confirmed((0.0, 2.0), 1.0)
    assert radius == pytest.approx(0.3, rel=1e-5) and predicted == 1
    assert confirmed((0.0, 2.0), 0.29) == (None, -1)


def test_a_misclassified_image_has_radius_zero() -> None:
    x, y = images_at((0.3,)), torch.ones(1, dtype=torch.int64)
    found = confirm(
        Halves(),
        None,
        x,
        x.__getitem__,
        y,
        plan=SmoothingPlan(SIGMA, samples=400),
        stream=rng.stream(0, "a", y),
        largest=1.0,
    )
    assert found == [(0.0, 0)]


def test_only_images_that_are_classified_correctly_are_attacked() -> None:
    """The second image is misclassified without a perturbation."""
    x, y = images_at((0.1, 0.3, 0.1)), torch.tensor([0, 1, 0])
    searched: list[list[int]] = []

    def search(rows: Tensor) -> Tensor:
        searched.append(rows.tolist())
        return images_at((-0.3, -0.2))

    plan = SmoothingPlan(SIGMA, samples=400, failure=1e-6)
    found = confirm(
        Halves(),
        None,
        x,
        search,
        y,
        plan=plan,
        stream=rng.stream(0, "a", torch.arange(3)),
        largest=1.0,
    )
    assert searched == [[0, 2]] and [predicted for _, predicted in found] == [1, 0, 1]
    assert [radius for radius, _ in found] == pytest.approx([0.4, 0.0, 0.3], rel=1e-5)


def test_images_that_only_the_stand_in_misclassifies_are_moved() -> None:
    """Towards the hyperplane, or away from it if that is where the wrong class lies; the others
    stay as they are."""
    x, y = images_at((0.01, -0.01, 0.2)), torch.tensor([1, 0, 0])
    x_adv = torch.cat([x[:2], images_at((-0.05,))])
    moved = move_misclassified(Halves(), x, x_adv, y, 0.02)
    assert torch.equal(moved[2], x_adv[2])
    assert torch.allclose(moved[:2], images_at((0.03, -0.03)), atol=1e-5)
