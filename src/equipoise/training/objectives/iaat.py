"""Instance-adaptive adversarial training [Balaji2019]: each image keeps the radius it can bear."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core import losses
from equipoise.core.geometry import per_example, project_to_ball
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, cross_entropy, right
from equipoise.training.objectives.adversarial import AdversarialObjective


@dataclass(frozen=True, kw_only=True)
class Iaat(AdversarialObjective):
    r"""Adversarial training at a radius of each image's own [Balaji2019, Algorithms 1 and 2].

    An image whose attack at eps + γ fails may grow by γ; one whose attack at eps succeeds shrinks by γ; others
    stay. The step is averaged over epochs: eps ← (1 − w)·eps + w·(eps ± γ or eps). The first epochs train
    everyone at the full radius. The attacks see the model in evaluation mode.
    """

    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    growth: float = setting(2 / 255, "Step of the radius, γ.", fraction=True)
    average: float = setting(0.1, "Weight of the new radius in the average over epochs.", share=True)
    warmup_epochs: int = setting(5, "Epochs at the full radius first.", least=0)
    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def at(self, epoch: int, epochs: int) -> Self:
        """`warmup_epochs` is 1 while it lasts and 0 after."""
        return dataclasses.replace(self, warmup_epochs=int(epoch < self.warmup_epochs))

    def memory(self, count: int) -> Memory:
        """(count,) radii; all begin at the full one."""
        return {"eps": torch.full((count,), self.eps)}

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        eps = memory["eps"].to(x.dtype)
        with inference(model):
            if self.warmup_epochs == 0:
                eps = self.adapt(model, x, y, eps, stream)
            x_adv = self.attack(model, x, y, eps, stream.at("train"))
        logits = model(x_adv)
        loss = cross_entropy(logits, y, self.label_smoothing)
        return ObjectiveOutput(loss, right(logits, y), {"eps": eps.to(memory["eps"].dtype)})

    def adapt(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, stream: Stream) -> Tensor:
        """(B,) radii after one epoch's step."""
        bears_more = self._stands(model, x, y, eps + self.growth, stream.at("more"))
        bears = self._stands(model, x, y, eps, stream.at("same"))
        step = torch.where(bears_more, 1.0, torch.where(bears, 0.0, -1.0)).to(eps.dtype) * self.growth
        return (eps + self.average * step).clamp_min(0)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) the last iterate of PGD in balls of radii (B,), from a random start."""
        noise = stream.uniform(*x.shape[1:], low=-1, high=1).to(x.dtype)
        start = project_to_ball(x + per_example(eps, x) * noise, x, self.norm, eps)
        return inner_pgd(lambda at: losses.cross_entropy(model(at), y), x, start, norm=self.norm, eps=eps,
                      step_size=2.5 * eps / self.steps, steps=self.steps)[-1]

    def _stands(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, stream: Stream) -> Tensor:
        x_adv = self.attack(model, x, y, eps, stream)
        with torch.no_grad():
            return right(model(x_adv), y)
