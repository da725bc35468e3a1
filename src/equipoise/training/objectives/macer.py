"""MACER [Zhai2020]: make the certified radius itself larger."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.objective import Memory, ObjectiveOutput, right
from equipoise.training.objectives.gaussian import SmoothingObjective


@dataclass(frozen=True, kw_only=True)
class Macer(SmoothingObjective):
    r"""Cross-entropy of the averaged probabilities, plus a hinge on the radius of those answered rightly.

    .. math::
        -\log \bar p_y + \lambda \frac{\sigma}{2}
        \big[\gamma - (\Phi^{-1}(\hat p_1) - \Phi^{-1}(\hat p_2))\big]_{\text{right, gap} \le \gamma}

    [Zhai2020, (9), (10)]. The averages with a hat are of softmax(β·z); p̂₁ ≥ p̂₂ are the two greatest. In the
    form of the SmoothMix code: images whose gap exceeds γ or is not finite do not count at all, the mean is over
    all images of the batch, and λ is zero in the first epochs ("deferred").
    """

    noises: int = setting(16, "Noises per image, m.", least=1)
    weight: float = setting(16.0, "Weight of the radius, λ.", fraction=True)
    beta: float = setting(16.0, "Inverse temperature inside the radius.", positive=True)
    gamma: float = setting(8.0, "Gap of the hinge.", positive=True)
    defer: int = setting(0, "Epochs without the radius first.", least=0)

    def at(self, epoch: int, epochs: int) -> Self:
        """No radius in the deferred epochs."""
        return dataclasses.replace(self, weight=0.0 if epoch < self.defer else self.weight, defer=0)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        z = noise.logits(model, x, noise.draw(x, self.sigma, self.noises, stream))
        average = torch.softmax(z, dim=2).mean(dim=1)
        loss = -torch.log(average.gather(1, y.unsqueeze(1)).squeeze(1) + 1e-10)
        if self.weight:
            loss = loss + self.weight * self.hinge(z, y)
        return ObjectiveOutput(loss, right(average, y))

    def hinge(self, z: Tensor, y: Tensor) -> Tensor:
        """(B, S, K) logits → (B,): σ/2·(γ − gap) where the label leads by a gap of at most γ, else 0."""
        sharp = torch.softmax(self.beta * z, dim=2).mean(dim=1)
        first, second = sharp.topk(2, dim=1).values.unbind(dim=1)
        with torch.no_grad():
            gap = torch.special.ndtri(first) - torch.special.ndtri(second)
            counts = right(sharp, y) & gap.isfinite() & (gap <= self.gamma)
        # Where it does not count, a harmless value keeps infinities out of the gradient.
        first, second = (torch.where(counts, p, 0.5) for p in (first, second))
        gap = torch.special.ndtri(first) - torch.special.ndtri(second)
        return torch.where(counts, (self.gamma - gap) * (self.sigma / 2), 0.0)
