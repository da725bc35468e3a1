"""What an evaluation is made of: models under attacks, and the conditions they share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.core import checks, device
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


class Attack(Protocol):
    """What every attack looks like from outside; other settings are bound beforehand."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """(B, C, H, W) images → attacked images."""


def untouched(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
    """The attack that does nothing: clean accuracy is accuracy under it."""
    return x


@dataclass(frozen=True)
class Job:
    """A model, or a mixture at one alpha, under one attack."""

    name: str
    model: nn.Module
    attack: str
    run: Attack
    alpha: float | None = None

    def __str__(self) -> str:
        return f"{self.name}{'' if self.alpha is None else f' (alpha {self.alpha:g})'}, {self.attack}"


def described(value: object) -> str:
    """An attack with every setting it will use, defaults included: two that differ anywhere read differently."""
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {models.model_identity(value)}"
    if isinstance(value, partial):
        return _call(value.func, {**_defaults(value.func), **value.keywords})
    if is_dataclass(value) and not isinstance(value, type):
        return _call(type(value), {each.name: getattr(value, each.name) for each in fields(value)})
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return _call(value, _defaults(value)) if callable(value) else repr(value)


def _call(function: Any, settings: Mapping[str, object]) -> str:
    inner = ", ".join(f"{key}={described(settings[key])}" for key in sorted(settings))
    return f"{getattr(function, '__qualname__', type(function).__name__)}({inner})"


def _defaults(function: Any) -> dict[str, object]:
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.default is not inspect.Parameter.empty}


@dataclass(frozen=True)
class Conditions:
    """What is the same for every subject of an evaluation."""

    threat: Threat
    device: torch.device = field(default_factory=lambda: device.pick("auto"))
    seed: int = 0
    batch_size: int = 128
    precision: str = "auto"

    def __post_init__(self) -> None:
        checks.require(isinstance(self.threat, Threat), "threat", "be a Threat", self.threat)
        checks.whole("seed", self.seed)
        checks.whole("batch_size", self.batch_size, least=1)
        device.usable(self.precision, self.device)
