"""SmoothMix [SmoothMix]: unlearn over-confidence on the way to the adversary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core.geometry import per_example, project_to_ball
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, divergence, right
from equipoise.training.objectives.gaussian import SmoothingObjective, mean_cross_entropy
from equipoise.training.objectives.smoothadv import unlikely

FORMS = ("code", "paper")


@dataclass(frozen=True, kw_only=True)
class SmoothMix(SmoothingObjective):
    r"""Cross-entropy under noise, plus the mixture of each image with its unrestricted adversary [SmoothMix].

    .. math::
        L = \tfrac1m\sum_i \ell(f(x+\delta_i), y) + \eta \tfrac1m\sum_i D\big(y^{mix}, f(x^{mix}+\delta_i)\big), \\
        x^{mix} = (1-\lambda)x + \lambda\tilde x, \quad y^{mix} = (1-\lambda)\hat F(x) + \lambda/K, \quad
        \lambda \sim U[0, \tfrac12]

    (7) to (11): x̃ is reached by `steps` steps of length `step_size` that lower the averaged probability of the
    label, in evaluation mode, with the same m noises, and no ball but [0, 1]. With `one_step` the clean side of
    everything is the first iterate instead of x. In the form `code` (the default; the published figures come
    from it) D is the KL divergence, its target carries gradient, and images whose averaged answer is wrong do
    not count; in the form `paper` D is the cross-entropy (10) with a fixed target, over all images. η and the
    reach of `one_step` grow linearly over the first epochs.
    """

    noises: int = setting(4, "Noises per image, m.", least=1)
    steps: int = setting(4, "Gradient steps of the attack, T.", least=1)
    step_size: float = setting(1.0, "Length of a step in ℓ2, α.", fraction=True)
    eta: float = setting(5.0, "Weight of the mixtures.", fraction=True)
    one_step: bool = setting(False, "Train on the first iterate instead of the clean image.")
    reach: float | None = setting(None, "Largest ℓ2 distance of the first iterate; step_size if not given.",
                                  fraction=True)
    max_norm: float | None = setting(None, "Largest ℓ2 distance of the adversary; none if not given.", fraction=True)
    form: str = setting("code", "code or paper, where the two differ.", among=FORMS)
    warmup_epochs: int = setting(10, "Epochs over which eta and the reach grow.", least=0)

    def at(self, epoch: int, epochs: int) -> Self:
        """The weight and the reach of this epoch."""
        grown = min(1.0, (epoch + 1) / self.warmup_epochs) if self.warmup_epochs else 1.0
        reach = self.step_size if self.reach is None else self.reach
        return dataclasses.replace(self, eta=self.eta * grown, reach=reach * grown, warmup_epochs=0)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        delta = noise.draw(x, self.sigma, self.noises, stream)
        with inference(model):
            iterates = inner_pgd(lambda at: unlikely(model, at, y, delta), x, x, norm="l2", eps=self.max_norm,
                              step_size=self.step_size, steps=self.steps)
        if self.one_step:
            x = project_to_ball(iterates[1], x, "l2", self.step_size if self.reach is None else self.reach)
        z = noise.logits(model, x, delta)
        average = torch.softmax(z, dim=2).mean(dim=1)
        correct = right(average, y)
        mixed = self.mixture(model, x, iterates[-1], average, delta, stream)
        if self.form == "code":
            mixed = correct * mixed
        return ObjectiveOutput(mean_cross_entropy(z, y) + self.eta * mixed, correct)

    def mixture(self, model: nn.Module, x: Tensor, x_adv: Tensor, average: Tensor, delta: Tensor,
                stream: Stream) -> Tensor:
        """(B,) the divergence (or cross-entropy) at the mixed images from the mixed targets, over the noises."""
        ratio = stream.at("ratio").uniform(high=0.5).to(x.dtype)
        lam = per_example(ratio, x)
        z = noise.logits(model, (1 - lam) * x + lam * x_adv, delta)
        log_p, ratio = torch.log_softmax(z, dim=2), ratio.to(average.dtype).unsqueeze(1)
        target = ((1 - ratio) * average + ratio / average.shape[1]).unsqueeze(1).expand_as(log_p)
        if self.form == "paper":
            return -(target.detach() * log_p).sum(dim=2).mean(dim=1)
        return divergence(log_p, target).mean(dim=1)
