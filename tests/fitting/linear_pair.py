"""Two linear models on random images: small enough to be attacked and fitted within a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.fitting import FitSettings
from equipoise.fitting.margin_attack import MarginAttack

THREAT = Threat("linf", 0.004)
QUICK = FitSettings(rounds=0, steps=4, targets=2, pool=2)


class Linear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x.flatten(1) - 0.5) @ self.weight.T


class NoGradients(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Function(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def make_pair(robust: type[Linear] = Linear) -> tuple[Linear, Linear]:
    generator = torch.Generator().manual_seed(0)
    weight, noise = (torch.randn(4, 48, generator=generator) for _ in range(2))
    return Linear(3 * weight), robust(weight + 0.7 * noise)


def make_data(count: int = 200) -> Dataset:
    """Images with the classes of the accurate model as labels."""
    images = torch.randint(
        0, 256, (count, 3, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    with torch.no_grad():
        labels = make_pair()[0](images.float() / 255).argmax(1)
    return Dataset(
        "random", "test", images, labels, torch.arange(100, 100 + count), ("a", "b", "c", "d")
    )


def make_attack(
    accurate: nn.Module,
    robust: nn.Module,
    data: Dataset | None = None,
    settings: FitSettings = QUICK,
) -> MarginAttack:
    return MarginAttack(
        accurate,
        robust,
        make_data() if data is None else data,
        THREAT,
        torch.device("cpu"),
        settings,
    )
