"""Synthetic cached logits: a robust model whose confidence goes with its correctness, and an
accurate one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from equipoise.core import rng
from equipoise.fitting.cached_logits import ANY_CLASS, CachedLogits


def make_logits(
    n: int = 300, classes: int = 6, seed: int = 0, points: int = 2, accuracy: float = 0.95
) -> CachedLogits:
    stream = rng.stream(seed, "synthetic", torch.arange(n))
    labels = stream.at("label").integers(classes)
    confidence = 3 * stream.at("sure").uniform()
    own = F.one_hot(labels, classes).float()
    clean = 2 * stream.at("noise").normal(classes) * 0.5 + (confidence.unsqueeze(1) + 0.3) * own
    other = F.one_hot((labels + 1 + stream.at("rival").integers(classes - 1)) % classes, classes)
    attacked = torch.stack([clean - own * (0.8 + 0.1 * k) + 0.4 * other for k in range(points)])
    predicted = torch.where(stream.at("right").uniform() < accuracy, labels, (labels + 1) % classes)
    accurate_logits = 4 * F.one_hot(predicted, classes).float() + 0.1 * stream.at("soft").normal(
        classes
    )
    return CachedLogits(
        clean,
        attacked,
        labels,
        torch.arange(n),
        predicted,
        torch.full((points, n), ANY_CLASS),
        accurate_logits,
    )
