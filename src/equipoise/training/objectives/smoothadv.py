"""SmoothAdv [Salman2019]: adversarial training of the smoothed classifier."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, right
from equipoise.training.objectives.gaussian import SmoothingObjective, mean_cross_entropy


@dataclass(frozen=True, kw_only=True)
class SmoothAdv(SmoothingObjective):
    r"""Cross-entropy under noise at the image that fools the average most [SmoothMix, (5), (6)].

    .. math:: x' = \arg\max_{\|x'-x\|_2 \le \varepsilon} -\log \tfrac1m \sum_i p_y(x' + \delta_i)

    As the official code has it: ℓ2, no random start, step 2·eps/steps, evaluation mode in the attack, the same m
    noises in attack and loss, and a radius that grows linearly over the first epochs. (Where the gradient is
    exactly zero the official code steps at random; here such an image stays.)
    """

    noises: int = setting(4, "Noises per image, m.", least=1)
    eps: float = setting(255 / 256, "Radius in ℓ2, in [0, 1] pixels.", fraction=True)
    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    warmup_epochs: int = setting(10, "Epochs over which the radius grows.", least=0)

    def at(self, epoch: int, epochs: int) -> Self:
        """The radius of this epoch."""
        reached = min(1.0, (epoch + 1) / self.warmup_epochs) if self.warmup_epochs else 1.0
        return dataclasses.replace(self, eps=self.eps * reached, warmup_epochs=0)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        delta = noise.draw(x, self.sigma, self.noises, stream)
        with inference(model):
            x_adv = inner_pgd(lambda at: unlikely(model, at, y, delta), x, x, norm="l2", eps=self.eps,
                           step_size=2 * self.eps / self.steps, steps=self.steps)[-1]
        z = noise.logits(model, x_adv, delta)
        with torch.no_grad():
            correct = right(noise.log_average(z), y)
        return ObjectiveOutput(mean_cross_entropy(z, y), correct)


def unlikely(model: nn.Module, x: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    """(B,) −log of the probability of the label, averaged over the noises (B, S, C, H, W)."""
    return -noise.log_average(noise.logits(model, x, delta)).gather(1, y.unsqueeze(1)).squeeze(1)
