"""Consistency regularisation [Jeong2020]: the same answer under every noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.objective import Memory, ObjectiveOutput, divergence, right
from equipoise.training.objectives.gaussian import SmoothingObjective, mean_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Consistency(SmoothingObjective):
    r"""Cross-entropy under noise, plus the spread of the answers and the entropy of their average p̄.

    .. math::
        \frac1m\sum_i \ell(f(x+\delta_i), y) + \lambda \frac1m \sum_i \mathrm{KL}(\bar p \,\|\, p_i) + \eta H(\bar p)

    [Jeong2020, (8), (9)]; the gradient flows through p̄.
    """

    noises: int = setting(2, "Noises per image, m.", least=2)
    weight: float = setting(5.0, "Weight of the spread, λ.", fraction=True)
    eta: float = setting(0.5, "Weight of the entropy.", fraction=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        z = noise.logits(model, x, noise.draw(x, self.sigma, self.noises, stream))
        log_p = torch.log_softmax(z, dim=2)
        average = log_p.exp().mean(dim=1)
        spread = divergence(log_p, average.unsqueeze(1).expand_as(log_p)).mean(dim=1)
        entropy = -(average * average.clamp_min(1e-20).log()).sum(dim=1)
        return ObjectiveOutput(mean_cross_entropy(z, y) + self.weight * spread + self.eta * entropy, right(average, y))
