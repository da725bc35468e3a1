"""Two small bases of different shapes, and a gate with opinions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.mixing import GatedClassifier, new_gate
from equipoise.models import build

B, C, H, W, K = 4, 3, 9, 11, 6


def images(count: int = B, seed: int = 2) -> Tensor:
    return torch.rand(count, C, H, W, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[nn.Module, nn.Module]:
    """Different architectures, so that widths and sizes of the maps differ."""
    return (build("resnet8", num_classes=K, image_shape=(C, H, W), seed=1).eval(),
            build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=2).eval())


def gated(**settings: Any) -> GatedClassifier:
    """In evaluation mode; its answers spread over about two units."""
    g, h = pair()
    gate = new_gate(g, h, images(2), width=4)
    model = GatedClassifier(g, h, gate, **settings)
    for sub in model.train().network.modules():
        if isinstance(sub, nn.BatchNorm1d | nn.BatchNorm2d):
            sub.momentum = None  # the statistics of these very images
    with torch.no_grad():
        model.parts(images(32, seed=3))
    return model.eval()
