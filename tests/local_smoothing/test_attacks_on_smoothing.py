"""Attacks run on every rule of the family, through second derivatives too."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import make_attack
from equipoise.core import losses, rng
from equipoise.core.threat import Threat
from equipoise.local_smoothing import (
    AdaptiveSmoothing,
    BinarySmoothing,
    Neighbours,
    SmoothedClassifier,
)
from equipoise.local_smoothing.smoothing import RULES, SPACES, TRUSTS
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6
ATTACKS: dict[str, dict[str, Any]] = {
    "pgd": {"steps": 4},
    "apgd": {"steps": 8},
    "targeted": {"steps": 8, "targets": 2},
    "fab": {"steps": 5, "targets": 2},
    "square": {"steps": 40},
}


def _images() -> Tensor:
    return torch.rand(
        B, C, H, W, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).float()


def _base(seed: int, classes: int = K) -> nn.Module:
    return (
        build("cnn_small", num_classes=classes, image_shape=(C, H, W), seed=seed)
        .eval()
        .requires_grad_(False)
    )


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_lowers_the_margin_of_every_rule(name: str) -> None:
    """The last layer is curved, so that R has a gradient of its own."""
    bases = [nn.Sequential(_base(seed), nn.Tanh()) for seed in (1, 2)]
    threat, random_stream, x = Threat("linf", 0.2), rng.stream(0, name, torch.arange(B)), _images()
    for trust, space, rule in product(TRUSTS, SPACES, RULES):
        model = SmoothedClassifier(bases[0], bases[1], 1.0, trust=trust, space=space, rule=rule)
        with torch.no_grad():
            y = model(x).argmax(dim=1)
        x_adv = make_attack(name, **ATTACKS[name])(model, x, y, threat=threat, stream=random_stream)
        assert float((x_adv - x).abs().max()) <= threat.eps
        before, after = (losses.signed_margin(model(at), y) for at in (x, x_adv))
        assert bool((after <= before).all()) and bool((after < before).any()), (trust, space, rule)


def _two_class_models() -> list[nn.Module]:
    images = torch.rand(30, C, H, W, generator=torch.Generator().manual_seed(7))
    votes = Neighbours(images, torch.arange(30) % 2, 2, k=5, weights="distance")
    g, h = (_base(seed, classes=2) for seed in (1, 2))
    return [
        SmoothedClassifier(g, votes, 0.1, trust="gradient"),
        SmoothedClassifier(g, votes, 0.1, trust="ratio"),
        BinarySmoothing(g, votes, 0.01),
        AdaptiveSmoothing(g, h, example=_images(), width=4, trust="ratio").eval(),
    ]


@pytest.mark.parametrize(
    "number", range(4), ids=["neighbours", "neighbours-ratio", "binary", "policy"]
)
def test_attacks_on_neighbours_two_classes_and_the_policy(number: int) -> None:
    model, x = _two_class_models()[number], _images()
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    random_stream = rng.stream(0, "apgd", torch.arange(B))
    x_adv = make_attack("apgd", steps=8)(
        model, x, y, threat=Threat("l2", 2.0), stream=random_stream
    )
    before, after = (losses.signed_margin(model(at), y) for at in (x, x_adv))
    assert bool((after < before).all())
