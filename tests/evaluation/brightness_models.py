"""Classifiers by the mean brightness of an image, whose smoothed versions are robust."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.certification import SmoothingPlan
from equipoise.data import Dataset
from equipoise.evaluation.certificates import CertificationConditions, CertificationJob

PLAN = SmoothingPlan(0.1, samples=120, n0=20, failure=0.01)
CONDITIONS = CertificationConditions(torch.device("cpu"), batch_size=50)


class Brightness(nn.Module):
    """Three classes of different width; counts its calls, and raises KeyboardInterrupt at call
    `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.calls, self.stop_at = 0, stop_at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        centres = torch.tensor([0.3, 0.5, 0.7], device=x.device, dtype=x.dtype)
        mean = x.flatten(1).mean(dim=1, keepdim=True)
        return 400 * (2 * mean * centres - centres**2)


class Threshold(nn.Module):
    """Two classes; `shift` moves the boundary away from the true one at ½."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.boundary = nn.Parameter(torch.tensor(0.5 + shift))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        above = 100 * (x.flatten(1).mean(dim=1) - self.boundary)
        return torch.stack((-above, above), dim=1)


def brightness_images(count: int = 10) -> Dataset:
    """Images numbered from 50 on; all but the first have the label that :class:`Brightness`
    predicts."""
    generator = torch.Generator().manual_seed(0)
    level = torch.randint(40, 216, (count, 1, 1, 1), generator=generator)
    images = (
        (level + torch.randint(-20, 21, (count, 1, 5, 7), generator=generator))
        .clamp(0, 255)
        .to(torch.uint8)
    )
    labels = Brightness()(images / 255).argmax(dim=1)
    labels[0] = (labels[0] + 1) % 3
    return Dataset("brightness", "test", images, labels, torch.arange(count) + 50, tuple("abc"))


def threshold_images(count: int = 40) -> Dataset:
    """From dark to bright, with the labels of an unshifted :class:`Threshold`."""
    level = torch.arange(count) * 190 // count + 30
    images = level.view(-1, 1, 1, 1).expand(count, 1, 2, 3).to(torch.uint8)
    return Dataset(
        "threshold", "test", images, (level > 127.5).long(), torch.arange(count), tuple("ab")
    )


def job(
    plan: SmoothingPlan = PLAN, *, mixed: bool = False, stop_at: int | None = None
) -> CertificationJob:
    return CertificationJob("m", Brightness(stop_at), plan, Brightness() if mixed else None)
