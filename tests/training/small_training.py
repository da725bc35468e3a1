"""A small data set, network and plan, shared by the tests of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.data.dataset import Dataset
from equipoise.training import TrainingPlan

PLAN = TrainingPlan(
    epochs=3,
    batch_size=16,
    lr=0.02,
    held_out=20,
    pad=1,
    flip=True,
    cutout=2,
    ema=0.9,
    save_seconds=0,
)
METADATA = {"arch": "cnn_small"}


def dataset(count: int = 90) -> Dataset:
    """Two classes, bright above or bright below: easy, but not learnt in one epoch."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(count) % 2
    images = torch.randint(0, 160, (count, 1, 6, 5), generator=generator, dtype=torch.uint8)
    images[labels == 0, :, :3] += 90
    images[labels == 1, :, 3:] += 90
    return Dataset("halves", "train", images, labels, torch.arange(count) + 7, ("up", "down"))


def network(seed: int = 0) -> nn.Module:
    return models.build("cnn_small", num_classes=2, image_shape=(1, 6, 5), seed=seed)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) for key, value in first.items()
    )
