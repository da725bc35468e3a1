"""The policy of adaptive smoothing [Bai2022]: whom to trust, learnt from attacks that aim at either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.core import losses
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.local_smoothing.policy import TARGETS, AdaptiveSmoothing
from equipoise.local_smoothing.smoothing import gate_of
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, cross_entropy, no_blanks, right
from equipoise.training.objectives.adversarial import AdversarialObjective
from equipoise.training.plan import TrainingPlan


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(AdversarialObjective):
    r"""The composite loss [Bai2022, Eq. (9)].

    .. math:: (\ell_{CE} + c_1)\,\big(c_2 + (c_3 - s\,\beta_\theta(x))_+\big)

    s = 1 (trust h) for attacks that aim at γ_t ≤ γ_0, s = −1 (trust g) for those beyond and for clean images. The
    sentence after (9) has the two cases the other way round; Figure 4 and the definition of the target before it do
    not. Images attacked through the policy itself, by a random number of steps, have no such target: for them it is
    the cross-entropy alone.

    The model is an :class:`~equipoise.local_smoothing.policy.AdaptiveSmoothing`. How often each kind of image comes the paper
    does not say; here a share is clean, a share meets the policy's own attack, the targets divide the rest.
    """

    recordable: ClassVar[bool] = False

    gamma_0: float = setting(55.0, "Strength at which the bases change places under attack.", fraction=True,
                             positive=True)
    c1: float = setting(0.5, "Added to the cross-entropy.", fraction=True)
    c2: float = setting(0.8, "Added to the hinge.", fraction=True)
    c3: float = setting(3.2, "How far β has to be on its side.", fraction=True)
    clean: float = setting(0.25, "Share of untouched images.", share=True)
    own: float = setting(0.25, "Share of images attacked through the policy.", share=True)
    steps: int = setting(10, "Gradient steps of the attacks.", least=1)

    def suits(self, plan: TrainingPlan) -> None:
        """No blank pixels."""
        no_blanks(plan)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        assert isinstance(model, AdaptiveSmoothing)
        kind, target = self.kinds(stream)
        x_adv = self.attack(model, x, y, target, kind, stream)
        logits, beta = model.both(x_adv)
        direct = cross_entropy(logits, y)
        wanted = torch.where((kind == 2) & (target <= self.gamma_0), 1.0, -1.0)
        composite = (direct + self.c1) * (self.c2 + torch.relu(self.c3 - wanted * beta))
        return ObjectiveOutput(torch.where(kind == 1, direct, composite), right(logits, y))

    def kinds(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(B,) 0 clean, 1 attacked through the policy, 2 aimed; and (B,) the γ_t of the latter."""
        draw = stream.at("kind").uniform()
        kind = torch.where(draw < self.clean, 0, torch.where(draw < self.clean + self.own, 1, 2))
        targets = torch.tensor(TARGETS, dtype=torch.float64, device=draw.device)
        return kind, targets[stream.at("target").integers(len(TARGETS))]

    def attack(self, model: AdaptiveSmoothing, x: Tensor, y: Tensor, target: Tensor, kind: Tensor,
               stream: Stream) -> Tensor:
        """(B, C, H, W) every image attacked as its kind asks, in one ascent."""
        gate, own = gate_of(target), kind == 1
        with inference(model):
            way = inner_pgd(lambda at: losses.cross_entropy(model.both(at, gate, own)[0], y), x, x, norm=self.norm,
                         eps=self.eps, step_size=2.5 * self.eps / self.steps, steps=self.steps)
        made = torch.where(own, 1 + stream.at("steps").integers(self.steps), self.steps)
        made = torch.where(kind == 0, 0, made)
        return torch.stack(way)[made, torch.arange(len(x), device=x.device)]
