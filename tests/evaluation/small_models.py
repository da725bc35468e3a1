"""Small models and images for tests of evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions

CONDITIONS = Conditions(Threat("linf", 0.05), torch.device("cpu"), batch_size=4)


def linear_model(seed: int = 0) -> nn.Module:
    """Six classes of 3 × 5 × 7 images."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(105, 6))


class SmallNet(nn.Module):
    """A convolution with batch norm, which suites fold into a faster copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(280, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.first(x))).flatten(1))
        return logits


class AtMostFour(nn.Module):
    """A model whose memory suffices for four images."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear_model()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits: Tensor = self.base(x)
        return logits


def random_images(count: int = 11, labels_of: nn.Module | None = None) -> Dataset:
    """Images numbered from 50 on; labels are random, or those of a model with every fifth one
    changed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 5, 7), generator=generator, dtype=torch.uint8)
    labels = torch.randint(6, (count,), generator=generator)
    if labels_of is not None:
        with torch.no_grad():
            labels = labels_of.eval()(pixels(images)).argmax(dim=1)
        labels[::5] = (labels[::5] + 1) % 6
    return Dataset("random", "test", images, labels, torch.arange(count) + 50, tuple("abcdef"))
