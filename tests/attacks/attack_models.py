"""Small models and data sets for the tests of attacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

THREAT = Threat("linf", 0.01)


class ConvNet(nn.Module):
    """Two convolutions with batch norms, one of them with a skip connection."""

    def __init__(self, *, reads_convolution: bool = False) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.head = nn.Linear(280, 6)  # so long a sum depends on the batch size
        self.reads_convolution = reads_convolution
        for norm in (self.norm1, self.norm2):
            norm.register_buffer("running_mean", torch.rand(8) - 0.5)
            norm.register_buffer("running_var", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        convolved = self.first(x)
        out = torch.relu(self.norm1(convolved))
        out = out + torch.relu(self.norm2(self.second(out))) + (convolved if self.reads_convolution else 0)
        logits: Tensor = self.head(out.flatten(1))
        return logits


class BatchSizeDependent(nn.Module):
    """Logits depend on the batch size, as with convolutions on CUDA; remembers the sizes. It has no faster copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(105, 40), nn.Linear(40, 6)
        self.batch_sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batch_sizes.append(len(x))
        logits: Tensor = self.head(torch.relu(self.first(x.flatten(1))))
        return logits + 0.3 * torch.sin(torch.arange(6.0) * len(x))


class HardDecision(nn.Module):
    """Logarithm of a one-hot prediction: the same classes as the base, no gradients, logits of −inf."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        z = self.base(x).detach()
        return torch.zeros_like(z).scatter(1, z.argmax(dim=1, keepdim=True), 1).log()


def make_data(model: nn.Module, count: int = 37) -> Dataset:
    """Random images; the model misclassifies every fifth."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 5, 7), generator=generator, dtype=torch.uint8)
    with torch.no_grad():
        labels = model(pixels(images)).argmax(dim=1)
    labels[::5] = (labels[::5] + 1) % 6
    return Dataset("random", "test", images, labels, torch.arange(count) + 50, tuple("abcdef"))


def inner_images(count: int) -> tuple[Tensor, Stream]:
    """Images so far from 0 and 1 that the box never binds."""
    index = torch.arange(count)
    return stream(3, "inner", index).uniform(3, 5, 7, low=0.4, high=0.6).double(), stream(0, "attack", index)
