"""Two small bases of different architectures, a gated mixture of them, and a plain PGD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import geometry, losses
from equipoise.core.ascent import ascend
from equipoise.core.threat import Threat
from equipoise.mixing import GatedClassifier, new_gate
from equipoise.models import build

B, C, H, W, K = 4, 3, 9, 11, 6


def images(count: int = B, seed: int = 2) -> Tensor:
    return torch.rand(count, C, H, W, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[nn.Module, nn.Module]:
    """Different architectures, so that widths and sizes of the maps differ."""
    return (
        build("resnet8", num_classes=K, image_shape=(C, H, W), seed=1).eval(),
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=2).eval(),
    )


def gated(**settings: Any) -> GatedClassifier:
    """In evaluation mode; the gate's outputs have a standard deviation of about one."""
    g, h = pair()
    gate = new_gate(g, h, images(2), width=4)
    model = GatedClassifier(g, h, gate, **settings)
    for sub in model.train().network.modules():
        if isinstance(sub, nn.BatchNorm1d | nn.BatchNorm2d):
            sub.momentum = None  # the statistics of these very images
    with torch.no_grad():
        model.log_probabilities_and_gate(images(32, seed=3))
    return model.eval()


def attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float,
    *,
    surrogate: nn.Module | None = None,
    extra: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """PGD with ℓ∞ radius eps and gradients of the surrogate; of all iterates the one with the least
    margin."""
    threat, source = Threat("linf", eps), surrogate or model

    def objective(at: Tensor) -> Tensor:
        loss = losses.cross_entropy(source(at), y)
        return loss if extra is None else loss + extra(at)

    best, least = x, losses.signed_margin(model(x), y).detach()
    for point in ascend(
        objective,
        x,
        norm="linf",
        step_size=eps / 5,
        steps=20,
        project=partial(geometry.project, x=x, threat=threat),
    ):
        margin = losses.signed_margin(model(point), y).detach()
        best = torch.where((margin < least).view(-1, 1, 1, 1), point, best)
        least = torch.minimum(margin, least)
    return best
