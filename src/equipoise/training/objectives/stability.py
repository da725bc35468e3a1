"""Stability training [Li2019]: accuracy on the image, the same answer under noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.objective import Memory, ObjectiveOutput, cross_entropy, right
from equipoise.training.objectives.gaussian import SmoothingObjective


@dataclass(frozen=True, kw_only=True)
class Stability(SmoothingObjective):
    r"""Cross-entropy of the clean image, plus that of its noisy answer against its clean one.

    .. math:: \ell(f(x), y) - \lambda \sum_k p_k(x) \log p_k(x + \delta)

    [Li2019, (11)], in the form of the SmoothMix code: the first term is on the *clean* image, and the gradient
    flows through both factors of the second.
    """

    weight: float = setting(2.0, "Weight of the noisy term, λ.", fraction=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        logits = model(x)
        z = noise.logits(model, x, noise.draw(x, self.sigma, 1, stream)).squeeze(1)
        unstable = -(torch.softmax(logits, dim=1) * torch.log_softmax(z, dim=1)).sum(dim=1)
        return ObjectiveOutput(cross_entropy(logits, y) + self.weight * unstable, right(z, y))
