"""Small models and images, shared by the tests of objectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.core.rng import Stream
from equipoise.training import Objective

B, SHAPE, K = 4, (3, 5, 7), 6


class NormNetwork(nn.Module):
    """With batch norm, so that training and evaluation mode differ."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Linear(8 * 3 * 5, K),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))
        return logits


class PlainNetwork(nn.Module):
    """Without batch norm, so that the loss of an image does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(105, 20), nn.Linear(20, K)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.tanh(self.first(x.flatten(1))))
        return logits


def images(seed: int = 1) -> Tensor:
    return torch.rand(B, *SHAPE, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 5, 2, 2])


def stream(seed: int = 0) -> Stream:
    return rng.stream(seed, "train", torch.arange(10, 10 + B))


def losses(objective: Objective, model: nn.Module, x: Tensor, y: Tensor, seed: int = 0) -> Tensor:
    return objective(model, x, y, stream(seed), objective.initial_memory(len(x))).losses
