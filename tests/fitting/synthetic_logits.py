"""Cached logits of models that never were: a robust one that is sure when right, and an accurate one."""

from __future__ import annotations

import torch

from equipoise.core.rng import stream
from equipoise.fitting import Cache


def make(n: int = 300, classes: int = 6, seed: int = 0, points: int = 2, accurate: float = 0.95) -> Cache:
    chance = stream(seed, "synthetic", torch.arange(n))
    labels = chance.at("label").integers(classes)
    sure = 3 * chance.at("sure").uniform()
    own = torch.nn.functional.one_hot(labels, classes).float()
    noise = chance.at("noise").normal(classes)
    clean = 2 * noise * 0.5 + (sure.unsqueeze(1) + 0.3) * own
    rival = torch.nn.functional.one_hot((labels + 1 + chance.at("rival").integers(classes - 1)) % classes, classes)
    attacked = torch.stack([clean - own * (0.8 + 0.1 * k) + 0.4 * rival for k in range(points)])
    right = chance.at("right").uniform() < accurate
    said = torch.where(right, labels, (labels + 1) % classes)
    soft = 4 * torch.nn.functional.one_hot(said, classes).float() + 0.1 * chance.at("soft").normal(classes)
    return Cache(clean, attacked, labels, torch.arange(n), said, None, soft)
