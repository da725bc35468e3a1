"""The shortest training that makes the demo's two classifiers: standard, or on attacked images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import data, geometry, progress, rng
from equipoise.data import Dataset
from equipoise.threat import Threat


def learn(
    name: str,
    model: nn.Module,
    images: Dataset,
    *,
    epochs: int,
    lr: float,
    seed: int,
    threat: Threat | None = None,
    smoothing: float = 0.0,
    batch_size: int = 128,
) -> nn.Module:
    """AdamW under a triangular learning rate; with a threat, on images attacked by four steps of PGD.

    A function of the seed alone: order and attack chance follow the image.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)
    total = epochs * -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / (0.2 * total), (total - step) / (0.8 * total)))
    device = next(model.parameters()).device
    with progress.task(f"training the {name} classifier", total=epochs * len(images)) as task:
        for epoch in range(epochs):
            for batch in data.shuffled(images, batch_size, seed=seed, epoch=epoch, device=device):
                x = batch.images
                if threat is not None:
                    x = _harden(model, batch, threat, rng.stream(seed, "learning", batch.index).at(epoch))
                loss = F.cross_entropy(model(x), batch.labels, label_smoothing=smoothing)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                task.advance(len(batch), epoch=f"{epoch + 1}/{epochs}")
    return model.eval()


def _harden(model: nn.Module, batch: data.Batch, threat: Threat, chance: rng.Stream, steps: int = 4) -> Tensor:
    """Four steps up the loss from a random start; unlike an attack, it also moves images that are wrong already."""
    x = geometry.draw(batch.images, threat, chance)
    for _ in range(steps):
        x.requires_grad_()
        gradient = torch.autograd.grad(F.cross_entropy(model(x), batch.labels, reduction="sum"), x)[0]
        step = 2.5 * threat.eps / steps * geometry.steepest(gradient, threat.norm)
        x = geometry.project(x.detach() + step, batch.images, threat)
    return x
