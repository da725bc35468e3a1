"""Small models and images on disk, for tests of commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from equipoise import models
from equipoise.models import checkpoint


def write_files(folder: Path) -> None:
    """Twelve images and three checkpoints: two bases, and one of another number of classes."""
    generator = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        images=generator.integers(0, 256, (12, 3, 8, 8), dtype=np.uint8),
        labels=np.arange(12) % 4,
    )
    for seed, name in enumerate(("accurate", "robust")):
        base = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=seed)
        checkpoint.save(folder / f"{name}.safetensors", base, {})
    other = models.build("cnn_small", num_classes=5, image_shape=(3, 8, 8))
    checkpoint.save(folder / "other.safetensors", other, {})


def write_pair(folder: Path, count: int) -> None:
    """Images that one small network labels, that network, and another one that differs from it."""
    images = np.random.default_rng(0).integers(0, 256, (count, 3, 8, 8), dtype=np.uint8)
    accurate, robust = (
        models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=5) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        # The fresh network prefers one class; its last layer is centred so that all classes occur.
        for model in (accurate, robust):
            model.fc.weight.mul_(20)  # type: ignore[union-attr, operator]
        x = torch.from_numpy(images).float() / 255
        z = accurate.eval()(x)
        for model in (accurate, robust):
            model.fc.bias.sub_(z.mean(0))  # type: ignore[union-attr, operator]
        labels = accurate(x).argmax(1).numpy()
        noise = torch.randn(robust.fc.weight.shape, generator=generator)  # type: ignore[union-attr, arg-type]
        robust.fc.weight.add_(0.3 * robust.fc.weight.std() * noise)  # type: ignore[union-attr, operator]
    np.savez(folder / "images.npz", images=images, labels=labels)
    checkpoint.save(folder / "accurate.safetensors", accurate, {})
    checkpoint.save(folder / "robust.safetensors", robust, {})
