"""Adversarial training by projected gradient ascent [Madry2018]."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from equipoise import attacks
from equipoise.core import geometry, losses
from equipoise.core.geometry import project_to_ball
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.core.threat import NORMS, Threat
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, Objective, ObjectiveOutput, cross_entropy, right

JUDGED_BY_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class AdversarialObjective(Objective):
    """What all objectives against a threat share: the ball, and being judged under attack."""

    norm: str = setting("linf", "Norm of the perturbation: linf or l2.", among=NORMS)
    eps: float = setting(8 / 255, "Radius in [0, 1] pixels, such as 8/255.", fraction=True, positive=True)

    def judge(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream) -> dict[str, Tensor]:
        """Clean, and under PGD of ten steps at the full radius."""
        x_adv = attacks.pgd(model, x, y, threat=Threat(self.norm, self.eps), stream=stream, steps=JUDGED_BY_STEPS)
        return {"clean": right(model(x), y), "attacked": right(model(x_adv), y)}


@dataclass(frozen=True, kw_only=True)
class Adversarial(AdversarialObjective):
    r"""The loss at the adversary's image: :math:`\ell(f(x'), y)`, x' found by PGD in the ball [Madry2018, (2.1)].

    The attack sees the model in evaluation mode (running statistics of batch norm), the loss in training mode.
    Fewer steps in the first epochs cost little robustness at the end and save most of their time.
    """

    steps: int = setting(7, "Gradient steps of the attack.", least=1)
    step_size: float | None = setting(None, "Length of a step; 2.5·eps/steps if not given.", fraction=True)
    random_start: bool = setting(True, "Begin at a uniform point of the ball.")
    early_steps: int | None = setting(None, "Steps of the attack in the early epochs, if fewer.", least=1)
    early: float = setting(0.5, "Share of the epochs that are early.", share=True)
    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def at(self, epoch: int, epochs: int) -> Self:
        """Early epochs have their own number of steps."""
        is_early = self.early_steps is not None and epoch < self.early * epochs
        steps = self.early_steps if is_early and self.early_steps is not None else self.steps
        return dataclasses.replace(self, steps=steps, early_steps=None)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        start = x
        if self.random_start:
            start = geometry.draw(x, Threat(self.norm, self.eps), stream.at("start"))
        x_adv = self.attack(model, x, y, start)
        logits = model(x_adv)
        return ObjectiveOutput(cross_entropy(logits, y, self.label_smoothing), right(logits, y))

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor) -> Tensor:
        """(B, C, H, W) the last iterate of PGD on the cross-entropy."""
        stride = 2.5 * self.eps / self.steps if self.step_size is None else self.step_size
        with inference(model):
            return inner_pgd(lambda at: losses.cross_entropy(model(at), y), x, project_to_ball(start, x, self.norm, self.eps),
                          norm=self.norm, eps=self.eps, step_size=stride, steps=self.steps)[-1]
