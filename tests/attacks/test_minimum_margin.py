from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise import attacks
from equipoise.core import geometry, losses
from equipoise.core.rng import stream
from equipoise.core.threat import NORMS, Threat


@pytest.mark.parametrize("norm", NORMS)
def test_two_linear_classes_closed_form(norm: str) -> None:
    """The smallest probability margin is tanh of half the smallest logit gap, also beyond the boundary."""
    weight = torch.zeros(2, 105, dtype=torch.float64)
    weight[1] = 0.2 * torch.randn(105, generator=generator(0), dtype=torch.float64)
    x = stream(3, "inner", torch.arange(12)).uniform(3, 5, 7, low=0.4, high=0.6).double()
    centre = (x.flatten(1) @ weight[1]).mean()
    model = Linear(weight, torch.stack([centre * 0, 0.3 - centre]))
    y = torch.ones(12, dtype=torch.int64)
    eps = 0.02 if norm == "linf" else 0.15
    dual = weight[1].abs().sum() if norm == "linf" else weight[1].norm()
    found = attacks.minimum_margin(model, x, y, threat=Threat(norm, eps), stream=stream(0, "a", torch.arange(12)),
                                   steps=40, pool=2)
    gap = losses.signed_margin(model(x), y) - eps * dual
    assert bool((gap < 0).any()) and bool((gap > 0).any())
    torch.testing.assert_close(found.margins[0], torch.tanh(gap / 2).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gradient_free", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_pool(norm: str, gradient_free: bool, linear: Linear) -> None:
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat(norm, 0.02 if norm == "linf" else 0.2)
    found = attacks.minimum_margin(linear, x, y, threat=threat, stream=stream(0, "a", torch.arange(4)), pool=3,
                                   steps=10, targets=3, gradient_free=gradient_free)
    assert found.images.shape == (3, 4, 3, 5, 7) and found.margins.shape == (3, 4)
    assert bool((found.margins[:-1] <= found.margins[1:]).all()), "from the smallest upwards"
    for images, margins in zip(found.images, found.margins, strict=True):
        torch.testing.assert_close(losses.probability_margin(linear(images), y).detach(), margins)
        assert float(geometry.size(images - x, norm).max()) <= threat.eps * (1 + 1e-6)
    assert bool((found.margins[0] < losses.probability_margin(linear(x), y)).all())
    assert not torch.equal(found.images[0], found.images[1]), "diverse"


def test_more_targets_only_lower_the_margin(linear: Linear) -> None:
    x = stream(3, "x", torch.arange(6)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    chance, threat = stream(0, "a", torch.arange(6)), Threat("linf", 0.01)
    few, many = (attacks.minimum_margin(linear, x, y, threat=threat, stream=chance, steps=12, targets=targets)
                 for targets in (1, 5))
    assert bool((many.margins <= few.margins).all())
    spared = attacks.minimum_margin(linear, x, y, threat=threat, stream=chance, steps=12, targets=5, spare_broken=True)
    assert torch.equal(spared.margins < 0, many.margins < 0)
    assert bool((spared.margins >= many.margins).all())


class Torn(nn.Module):
    """Brighter images have larger margins of logits and smaller margins of probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        t = (x - 0.5).flatten(1).mean(dim=1) / 0.1
        rest = (2 * (t - 1)).unsqueeze(1).expand(-1, 4)
        return torch.cat([(1.1 + 0.1 * t).unsqueeze(1), torch.zeros_like(rest[:, :1]), rest], dim=1)


def test_without_gradients_the_margin_of_probabilities_is_lowered() -> None:
    x, y = torch.full((3, 3, 5, 7), 0.5), torch.zeros(3, dtype=torch.int64)
    found = attacks.minimum_margin(Torn(), x, y, threat=Threat("linf", 0.1), stream=stream(0, "a", torch.arange(3)),
                                   gradient_free=True, steps=6)
    best = losses.probability_margin(Torn()(x + 0.1), y)  # 0.28; the smallest margin of logits has 0.45
    assert float(best[0]) < 0.29
    assert bool((found.margins[0] < best + 0.02).all())


def test_without_gradients_a_saturated_margin_is_no_wall() -> None:
    """Probabilities of a confident model are 1 and 0 far around the image; its logits still show the way."""
    class Sure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            own = 200 - 3000 * (x - 0.5).flatten(1).mean(dim=1)
            return torch.stack([own, torch.zeros_like(own), torch.zeros_like(own)], dim=1)

    x, y = torch.full((3, 3, 5, 7), 0.5), torch.zeros(3, dtype=torch.int64)
    found = attacks.minimum_margin(Sure(), x, y, threat=Threat("linf", 0.1), stream=stream(0, "a", torch.arange(3)),
                                   gradient_free=True, steps=6)
    assert bool((found.margins[0] < 0).all())
