from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_models import inner_images
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise.attacks import Apgd, Square, Suite, margin_suite, minimum_margin
from equipoise.core import geometry, losses
from equipoise.core.rng import stream
from equipoise.core.threat import NORMS, Threat


@pytest.mark.parametrize("norm", NORMS)
def test_two_linear_classes_closed_form(norm: str) -> None:
    """The smallest probability margin is tanh of half the smallest logit gap, also beyond the
    boundary."""
    weight = torch.zeros(2, 105, dtype=torch.float64)
    weight[1] = 0.2 * torch.randn(105, generator=generator(0), dtype=torch.float64)
    x, _ = inner_images(12)
    centre = (x.flatten(1) @ weight[1]).mean()
    model = Linear(weight, torch.stack([centre * 0, 0.3 - centre]))
    y = torch.ones(12, dtype=torch.int64)
    eps = {"linf": 0.02, "l2": 0.15, "l1": 0.35}[norm]
    points = minimum_margin(
        model,
        x,
        y,
        threat=Threat(norm, eps),
        stream=stream(0, "a", torch.arange(12)),
        attack=margin_suite(steps=40),
        pool=2,
    )
    gap = losses.signed_margin(model(x), y) - eps * geometry.dual_norm(weight[1:], norm)
    assert bool((gap < 0).any()) and bool((gap > 0).any())
    torch.testing.assert_close(
        points.margins[0], torch.tanh(gap / 2).detach(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    "attack", [margin_suite(10, 3), Square(500, restarts=3)], ids=["gradients", "gradient-free"]
)
@pytest.mark.parametrize("norm", NORMS)
def test_pool_is_sorted_true_and_diverse(norm: str, attack: Square, linear: Linear) -> None:
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat(norm, {"linf": 0.02, "l2": 0.2, "l1": 3.0}[norm])
    points = minimum_margin(
        linear, x, y, threat=threat, stream=stream(0, "a", torch.arange(4)), attack=attack, pool=3
    )
    assert points.images.shape == (3, 4, 3, 5, 7) and points.margins.shape == (3, 4)
    assert bool((points.margins[:-1] <= points.margins[1:]).all()), "from the smallest upwards"
    for images, margins in zip(points.images, points.margins, strict=True):
        torch.testing.assert_close(losses.probability_margin(linear(images), y).detach(), margins)
        assert float(geometry.size(images - x, norm).max()) <= threat.eps * (1 + 1e-6)
    assert bool((points.margins[0] < losses.probability_margin(linear(x), y)).all())
    assert not torch.equal(points.images[0], points.images[1])


@pytest.mark.parametrize(("pool", "skip_broken"), [(2, False), (3, True), (20, True)])
def test_the_outputs_of_a_part_are_those_at_the_points(
    pool: int, skip_broken: bool, linear: Linear
) -> None:
    """Also of images that no stage attacks, and where a pool is larger than the number of
    stages."""
    x = stream(3, "x", torch.arange(6)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 6
    points = minimum_margin(
        nn.Sequential(linear, nn.Softplus()),
        x,
        y,
        threat=Threat("linf", 0.02),
        pool=pool,
        stream=stream(0, "a", torch.arange(6)),
        attack=margin_suite(6, 2),
        skip_broken=skip_broken,
        observe=linear,
    )
    assert points.observed is not None
    for images, outputs in zip(points.images, points.observed, strict=True):
        torch.testing.assert_close(outputs, linear(images).detach())
    if skip_broken:
        assert torch.equal(points.images[:, 0], x[:1].expand(pool, -1, -1, -1)), (
            "misclassified clean"
        )


def test_verdicts_of_several_passes_have_no_outputs_of_a_part(linear: Linear) -> None:
    x = stream(3, "x", torch.arange(6)).uniform(3, 5, 7).double()
    attack = Suite((Apgd(steps=3), Apgd("dlr", steps=3, repeats=2)))
    points = minimum_margin(
        linear,
        x,
        torch.zeros(6, dtype=torch.int64),
        threat=Threat("linf", 0.02),
        attack=attack,
        stream=stream(0, "a", torch.arange(6)),
        observe=linear,
    )
    assert points.observed is None and bool(points.margins.isfinite().all())


def test_more_targets_only_lower_the_margin(linear: Linear) -> None:
    x = stream(3, "x", torch.arange(6)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    numbers, threat = stream(0, "a", torch.arange(6)), Threat("linf", 0.01)
    few, many, skipping = (
        minimum_margin(
            linear,
            x,
            y,
            threat=threat,
            stream=numbers,
            attack=margin_suite(12, targets),
            skip_broken=skip,
        )
        for targets, skip in ((1, False), (5, False), (5, True))
    )
    assert bool((many.margins <= few.margins).all())
    assert torch.equal(skipping.margins < 0, many.margins < 0), (
        "skipping broken images changes no verdict"
    )
    assert bool((skipping.margins >= many.margins).all())


class OppositeMargins(nn.Module):
    """Brighter images have larger margins of logits and smaller margins of probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        t = (x - 0.5).flatten(1).mean(dim=1) / 0.1
        rest = (2 * (t - 1)).unsqueeze(1).expand(-1, 4)
        return torch.cat([(1.1 + 0.1 * t).unsqueeze(1), torch.zeros_like(rest[:, :1]), rest], dim=1)


def test_without_gradients_the_margin_of_probabilities_is_lowered() -> None:
    x, y = torch.full((3, 3, 5, 7), 0.5), torch.zeros(3, dtype=torch.int64)
    points = minimum_margin(
        OppositeMargins(),
        x,
        y,
        threat=Threat("linf", 0.1),
        stream=stream(0, "a", torch.arange(3)),
        attack=Square(300),
    )
    best = losses.probability_margin(
        OppositeMargins()(x + 0.1), y
    )  # 0.28; the smallest margin of logits has 0.45
    assert float(best[0]) < 0.29
    assert bool((points.margins[0] < best + 0.02).all())


class Saturated(nn.Module):
    """Probabilities are 1 and 0 far around the image; the logits still change."""

    def forward(self, x: Tensor) -> Tensor:
        own = 200 - 3000 * (x - 0.5).flatten(1).mean(dim=1)
        return torch.stack([own, torch.zeros_like(own), torch.zeros_like(own)], dim=1)


def test_without_gradients_saturated_probabilities_are_no_obstacle() -> None:
    x, y = torch.full((3, 3, 5, 7), 0.5), torch.zeros(3, dtype=torch.int64)
    points = minimum_margin(
        Saturated(),
        x,
        y,
        threat=Threat("linf", 0.1),
        stream=stream(0, "a", torch.arange(3)),
        attack=Square(300),
    )
    assert bool((points.margins[0] < 0).all())


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batches_of_one_size_find_the_same_points(batch_size: int, linear: Linear) -> None:
    """Every search sees the same number of images, also where most of them are broken and left
    out."""
    x = stream(3, "x", torch.arange(10)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    sizes = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                sizes.append(len(x))
            logits: Tensor = linear(x)
            return logits

    options: dict[str, Any] = {
        "threat": Threat("linf", 0.01),
        "stream": stream(0, "a", torch.arange(10)),
        "attack": margin_suite(12, 3),
        "pool": 2,
        "skip_broken": True,
    }
    whole, parts = (
        minimum_margin(Watched(), x, y, batch_size=size, **options) for size in (None, batch_size)
    )
    torch.testing.assert_close(parts.margins, whole.margins)
    torch.testing.assert_close(parts.images, whole.images)
    sizes.clear()
    minimum_margin(Watched(), x, y, batch_size=batch_size, **options)
    assert set(sizes) == {min(batch_size, 10)}
