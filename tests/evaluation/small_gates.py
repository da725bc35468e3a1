"""A small gated mixture of digits, for tests of its adversaries."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise import models
from equipoise.core.threat import Threat
from equipoise.data import Dataset, load_data, pixels
from equipoise.evaluation import Conditions
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, new_gate


def gated() -> GatedClassifier:
    g, h = (
        models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval()
        for seed in (1, 2)
    )
    gate = new_gate(g, h, torch.rand(2, 1, 8, 8), width=4)
    return GatedClassifier(g, h, gate, alpha_min=0.3, alpha_max=0.9).eval()


def gated_over_map() -> GatedClassifier:
    model = gated()
    mapped = MixedClassifier(
        model.accurate, model.robust, 0.7, logit_map=LogitMap(2.0, 1.5, 0.1), hard=True
    )
    return model.with_settings_of(mapped)


def labelled_digits(model: MixedClassifier, count: int = 12) -> Dataset:
    """Digits labelled by the model itself, except for the last one."""
    digits = load_data("digits", count=count)
    with torch.no_grad():
        labels = model(pixels(digits.images)).argmax(dim=1)
    labels[-1] = (labels[-1] + 1) % 10
    return Dataset(digits.name, digits.split, digits.images, labels, digits.index, digits.classes)


def conditions(batch_size: int = 5, device: str = "cpu") -> Conditions:
    return Conditions(Threat("linf", 0.1), torch.device(device), 0, batch_size)


class SteepGate(GatedClassifier):
    """g predicts 1, h predicts 0, and the gate turns to g where an image is dark."""

    def logits_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.flatten(1).mean(dim=1)
        g, h = torch.zeros(len(x), 10), torch.zeros(len(x), 10)
        g[:, 1], h[:, 0] = 5.0, 0.2
        return g, h, self.scale * (mean - 0.5) + self.shift
