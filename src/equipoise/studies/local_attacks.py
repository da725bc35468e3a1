"""Attacks that a study makes once, and dear ones that meet only what a cheaper one leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.core import device, rng
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.evaluation import Attack


@dataclass
class CachedAttack:
    """An attack whose images several subjects share: made once, with a chance of its own, whoever asks first.

    It must not look at the model under attack (:func:`~equipoise.attacks.pgd.transfer`), or belong to one model only.
    """

    attack: Attack
    seed: int
    made: dict[tuple[Threat, tuple[int, ...]], Tensor] = field(default_factory=dict, repr=False)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """See :class:`~equipoise.evaluation.Attack`."""
        key = threat, tuple(stream.index.tolist())
        if key not in self.made:
            chance = rng.stream(self.seed, "once", stream.index)
            self.made[key] = self.attack(model, x, y, threat=threat, stream=chance)
        return self.made[key]


@dataclass(frozen=True)
class FallbackAttack:
    """An attack, and a second one on the images that the first leaves standing."""

    first: Attack
    second: Attack

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """See :class:`~equipoise.evaluation.Attack`."""
        x_adv = self.first(model, x, y, threat=threat, stream=stream).clone()
        with torch.no_grad(), device.exactly(x.device):
            rows = (model(x_adv).argmax(dim=1) == y).nonzero().squeeze(1)
        if len(rows):
            x_adv[rows] = self.second(model, x[rows], y[rows], threat=threat, stream=stream[rows])
        return x_adv
