"""What an evaluation is made of: models under attacks, and the conditions they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from equipoise import checks, device
from equipoise.rng import Stream
from equipoise.threat import Threat


class Attack(Protocol):
    """What every attack looks like from outside; other settings are bound beforehand."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """(B, C, H, W) images → attacked images."""


def untouched(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
    """The attack that does nothing: clean accuracy is accuracy under it."""
    return x


@dataclass(frozen=True)
class Subject:
    """A model, or a mixture at one alpha, under one attack."""

    name: str
    model: nn.Module
    attack: str
    run: Attack
    alpha: float | None = None

    def __str__(self) -> str:
        return f"{self.name}{'' if self.alpha is None else f' (alpha {self.alpha:g})'}, {self.attack}"


@dataclass(frozen=True)
class Conditions:
    """What is the same for every subject of an evaluation."""

    threat: Threat
    device: torch.device = field(default_factory=lambda: device.pick("auto"))
    seed: int = 0
    batch_size: int = 128
    precision: str = "auto"

    def __post_init__(self) -> None:
        checks.whole("batch_size", self.batch_size, least=1)
        checks.one_of("precision", self.precision, device.PRECISIONS)
