"""TRADES [Zhang2019]: accuracy on the image, and the same answer all over the ball."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, cross_entropy, divergence, right
from equipoise.training.objectives.adversarial import AdversarialObjective


@dataclass(frozen=True, kw_only=True)
class Trades(AdversarialObjective):
    r"""Cross-entropy plus the greatest divergence in the ball [Zhang2019, (3)].

    .. math:: \ell(f(x), y) + \beta \max_{x'} \mathrm{KL}(p(x) \,\|\, p(x'))

    As the official code has it: the adversary starts at x + 0.001·N(0, 1), raises the divergence in
    evaluation mode, and the gradient flows through both arguments of the KL.
    """

    eps: float = setting(0.031, "Radius in [0, 1] pixels, such as 8/255.", fraction=True, positive=True)
    beta: float = setting(6.0, "Weight of the divergence.", fraction=True)
    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    step_size: float | None = setting(None, "Length of a step; 0.007 for linf and 2·eps/steps for l2 if not given.",
                                      fraction=True)
    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        x_adv = self.attack(model, x, stream)
        logits = model(x)
        p, log_q = torch.softmax(logits, dim=1), torch.log_softmax(model(x_adv), dim=1)
        loss = cross_entropy(logits, y, self.label_smoothing) + self.beta * divergence(log_q, p)
        return ObjectiveOutput(loss, right(log_q, y))

    def attack(self, model: nn.Module, x: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) where the answer differs most from that at x."""
        stride = self.step_size
        if stride is None:
            stride = 0.007 if self.norm == "linf" else 2 * self.eps / self.steps
        start = x + 0.001 * stream.at("start").normal(*x.shape[1:]).to(x.dtype)
        with inference(model):
            with torch.no_grad():
                p = torch.softmax(model(x), dim=1)
            return inner_pgd(lambda at: divergence(torch.log_softmax(model(at), dim=1), p), x, start,
                          norm=self.norm, eps=self.eps, step_size=stride, steps=self.steps)[-1]
