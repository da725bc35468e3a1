"""The mixing network [Bai2024, Section 4.4]: tell attacked images from clean ones, where it matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks.targeted import ranked
from equipoise.core import checks, losses
from equipoise.core.geometry import per_example, project_to_ball
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.mixing.gated import GatedClassifier
from equipoise.mixing.rules import mix
from equipoise.training import gate_gradients
from equipoise.training.inner_apgd import auto_ascend
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objective import Memory, ObjectiveOutput, cross_entropy, no_blanks, right
from equipoise.training.objectives.adversarial import AdversarialObjective
from equipoise.training.plan import TrainingPlan

SETTINGS = ("A", "B", "C")  # of the training attacks [Bai2024, Tables 2 and 3]
TARGETS = 9
# How a gate learns: on a pair of ResNet-18, 50,000 images and an H200 in six minutes, in bf16.
PLAN = TrainingPlan(epochs=10, batch_size=250, optimizer="adamw", lr=5e-4, weight_decay=1e-5, warmup=0.2, ema=0.8, clip=10.0,
            held_out=0)


@dataclass(frozen=True, kw_only=True)
class GateLoss(AdversarialObjective):
    r"""The composite loss [Bai2024, Eq. (4.2)], of every image clean (s = 0) and attacked (s = 1).

    .. math:: c_{CE}\,\ell_{CE} + c_{BCE}\,\ell_{BCE}(\alpha_\theta, s) + c_{prod}\,\ell_{CE}\,\ell_{BCE}

    The model is a :class:`~equipoise.mixing.gated.GatedClassifier`; whatever its range, alpha is in (0, 1) here, in
    the loss and in the attacks. An image meets one attack at a time, made on the spot through the gate as it is:

    - A: PGD on the cross-entropy that does not see the gate's gradient;
    - B: PGD through the gate;
    - C: APGD through the gate, on the cross-entropy or (mostly) on the ratio towards one of the nine likeliest other
      classes.

    Per image, radius and the weight of a term that pushes alpha down (B and C) are drawn; the number of steps is
    drawn for the whole batch, from χ² with mean `steps`. A step of training costs about steps + 4 passes with
    gradients through both bases and the gate, for each image.
    """

    recordable: ClassVar[bool] = False  # the number of steps is drawn; the pass of an attack is recorded by itself

    adversary: str = setting("C", "Training attacks: A, B or C.", among=SETTINGS)
    c_ce: float = setting(0.0, "Weight of the cross-entropy of the mixture.", fraction=True)
    c_bce: float = setting(1.5, "Weight of telling clean from attacked.", fraction=True)
    c_prod: float = setting(0.2, "Weight of the product of both.", fraction=True)
    clean: float = setting(1.0, "Weight of a clean image; an attacked one has 1.", fraction=True)
    steps: int = setting(15, "Gradient steps of the attacks, on average.", least=1)
    least: float = setting(0.4, "Smallest radius, in units of eps.", fraction=True, positive=True)
    most: float = setting(1.1, "Largest radius, in units of eps.", fraction=True, positive=True)
    term: float = setting(0.4, "Largest weight of the term that pushes alpha down.", share=True)
    untargeted: float = setting(0.1, "Share of untargeted attacks in C.", share=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(self.least <= self.most, "least", f"be at most {self.most:g}, the largest radius", self.least)

    def suits(self, plan: TrainingPlan) -> None:
        """No blank pixels."""
        no_blanks(plan)

    def reads(self, model: nn.Module) -> dict[str, str]:
        """Two gates that look at different layers may begin with the same weights."""
        if not isinstance(model, GatedClassifier):
            return {}
        return {"taps": ";".join(map(",".join, model.network.taps)), "width": str(model.network.shape[2])}

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        if not isinstance(model, GatedClassifier):
            raise checks.InputError(f"`model` must be a GatedClassifier, got {type(model).__name__}")
        x_adv = self.attack(model, x, y, stream)
        # Together, so that the statistics of the gate are of clean and attacked images alike.
        g, h, z = model.parts(torch.cat((x, x_adv)))
        logits, twice = mix(g, h, z), torch.cat((y, y))
        direct, told = cross_entropy(logits, twice), self.told(z)
        clean, attacked = (self.c_ce * direct + self.c_bce * told + self.c_prod * direct * told).chunk(2)
        answered = right(logits, twice).chunk(2)[1]
        return ObjectiveOutput((self.clean * clean + attacked) / (1 + self.clean), answered)

    @staticmethod
    def told(z: Tensor) -> Tensor:
        """(2·B,) binary cross-entropy of the gate; the first half is clean, the second attacked."""
        clean, attacked = z.chunk(2)
        return torch.cat((F.softplus(clean), F.softplus(-attacked)))

    def attack(self, model: GatedClassifier, x: Tensor, y: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) every image attacked at its own radius."""
        eps = self.eps * stream.at("radius").uniform(low=self.least, high=self.most).to(x.dtype)
        push = stream.at("term").uniform(high=self.term).to(x.dtype) * (self.adversary != "A")
        steps = self.count(stream)
        start = project_to_ball(x + per_example(eps, x) * stream.at("start").uniform(*x.shape[1:], low=-1).to(x.dtype), x,
                       self.norm, eps)
        with inference(model):
            if self.adversary == "C":
                aim, slope = self.aims(model, x, y, stream), gate_gradients.slope(model, x, self.rise, self)
                return auto_ascend(lambda at: slope(at, y, push, aim), x, start, norm=self.norm, eps=eps, steps=steps)
            return inner_pgd(lambda at: self.rise(model, at, y, push), x, start, norm=self.norm, eps=eps,
                          step_size=2.5 * eps / steps, steps=steps)[-1]

    def rise(self, model: GatedClassifier, x: Tensor, y: Tensor, push: Tensor, aim: Tensor | None = None) -> Tensor:
        """(B,) what an attack raises: the loss of its kind, and by the weight `push` the term that lowers alpha."""
        g, h, z = model.parts(x, soft=True)
        logits = mix(g, h, z.detach() if self.adversary == "A" else z)
        value = losses.cross_entropy(logits, y)
        if aim is not None:
            value = torch.where(aim < 0, value, losses.targeted_dlr(logits, y, aim.clamp_min(0)))
        return (1 - push) * value + push * F.softplus(-z)

    def aims(self, model: GatedClassifier, x: Tensor, y: Tensor, stream: Stream) -> Tensor:
        """(B,) a likely other class for every image, −1 for those that are attacked untargeted."""
        with torch.no_grad():
            g, h, z = model.parts(x)
            others = ranked(mix(g, h, z), y)
        place = stream.at("target").integers(min(TARGETS, others.shape[1]))
        aim = others.gather(1, place.unsqueeze(1)).squeeze(1)
        return torch.where(stream.at("kind").uniform() < self.untargeted, -1, aim)

    def count(self, stream: Stream) -> int:
        """Steps of this batch: χ² with `steps` degrees of freedom, by the chance of its first image."""
        drawn = float(stream[:1].at("steps").normal(self.steps).square().sum())
        return min(max(round(drawn), 1), 3 * self.steps)
