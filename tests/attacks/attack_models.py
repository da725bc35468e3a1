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
        out = (
            out
            + torch.relu(self.norm2(self.second(out)))
            + (convolved if self.reads_convolution else 0)
        )
        logits: Tensor = self.head(out.flatten(1))
        return logits


class BatchSizeDependent(nn.Module):
    """Logits depend on the batch size, as with convolutions on CUDA; remembers the sizes. It has no
    faster copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(105, 40), nn.Linear(40, 6)
        self.batch_sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batch_sizes.append(len(x))
        logits: Tensor = self.head(torch.relu(self.first(x.flatten(1))))
        return logits + 0.3 * torch.sin(torch.arange(6.0) * len(x))


class HardDecision(nn.Module):
    """Logarithm of a one-hot prediction: the same classes as the base, no gradients, logits of
    −inf."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        z = self.base(x).detach()
        return torch.zeros_like(z).scatter(1, z.argmax(dim=1, keepdim=True), 1).log()


class Wrapper(nn.Module):
    """A model around another."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


class Scaled(Wrapper):
    """The model with its logits times a number."""

    def __init__(self, base: nn.Module, scale: float) -> None:
        super().__init__(base)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x) * self.scale
        return logits


class DividedByMargin(Wrapper):
    """The model with the logits of every image divided by the difference of the two largest: all
    margins are 1."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x)
        top = logits.topk(2, dim=1).values
        return logits / (top[:, :1] - top[:, 1:])


class Excluding(Wrapper):
    """The model with two further classes, which it excludes by logits of −inf."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x)
        return torch.cat([logits, logits.new_full((len(x), 2), -torch.inf)], dim=1)


class Waves(nn.Module):
    """Logits (v, −v), and −50 for further classes, with v = Σ wᵢ φ(xᵢ) + b and φ(u) = u +
    a·sin(f·u).

    The waves are small and steep, so gradients say little about where v is small. As v is a sum
    over pixels, its extremes over a ball are known (:meth:`breakable`).
    """

    def __init__(self, amplitude: float, frequency: float, num_classes: int = 10) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.amplitude, self.frequency, self.num_classes = amplitude, frequency, num_classes
        self.weight = nn.Parameter(torch.randn(64, generator=generator), requires_grad=False)
        self.images = (
            ((0.2 + 0.6 * torch.rand(32, 1, 8, 8, generator=generator)) * 255)
            .round()
            .to(torch.uint8)
        )
        self.bias = -self.terms(pixels(self.images).flatten(1)).sum(dim=1).median()

    def terms(self, u: Tensor) -> Tensor:
        return self.weight.to(u.dtype) * (u + self.amplitude * torch.sin(self.frequency * u))

    def forward(self, x: Tensor) -> Tensor:
        v = self.terms(x.flatten(1)).sum(dim=1) + self.bias
        others = v.new_full((len(x), self.num_classes - 2), -50)
        return torch.cat([torch.stack([v, -v], dim=1), others], dim=1)

    def data(self) -> Dataset:
        """32 images with the predictions of the model as labels."""
        labels = self(pixels(self.images)).argmax(dim=1)
        return Dataset(
            "waves",
            "test",
            self.images,
            labels,
            torch.arange(32),
            tuple(map(str, range(self.num_classes))),
        )

    def breakable(self, eps: float) -> Tensor:
        """(32,) whether some point of the ball, on a grid with 4000 values per pixel, has the other
        sign."""
        data = self.data()
        x = pixels(data.images).flatten(1).double()
        sign = torch.where(data.labels == 0, 1.0, -1.0).double()
        least = torch.full_like(x, torch.inf)
        for offset in torch.linspace(-eps, eps, 4001, dtype=torch.float64):
            least = torch.minimum(least, sign[:, None] * self.terms(x + offset))
        return least.sum(dim=1) + sign * self.bias < 0


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
    return stream(3, "inner", index).uniform(3, 5, 7, low=0.4, high=0.6).double(), stream(
        0, "attack", index
    )
