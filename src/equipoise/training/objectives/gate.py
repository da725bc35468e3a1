"""Objectives of networks that combine two classifiers: the gate [Bai2024, Section 4.4] and the
policy [Bai2022]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks.apgd import apgd_maximize
from equipoise.attacks.targeted import classes_by_logit
from equipoise.core import ascent, checks, losses
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.local_smoothing.policy import TARGETS, AdaptiveSmoothing
from equipoise.local_smoothing.smoothing import log_strength
from equipoise.mixing.formula import mix
from equipoise.mixing.gated import GatedClassifier
from equipoise.mixing.surrogates import RESERVES, Sides, hinge_sums
from equipoise.training.objective import Memory, ObjectiveOutput, TrainingPlan, correct_predictions
from equipoise.training.objectives.adversarial import AdversarialObjective, inner_pgd, random_start
from equipoise.training.objectives.gate_gradients import loss_and_gradient

ADVERSARIES = ("A", "B", "C")  # training attacks [Bai2024, Tables 2 and 3]
GATE_PLAN = TrainingPlan(
    epochs=10,
    batch_size=250,
    optimizer="adamw",
    lr=5e-4,
    weight_decay=1e-5,
    warmup=0.2,
    ema=0.8,
    clip=10.0,
    held_out=0,
)
CLEAN, POLICY_ATTACK, TARGETED_ATTACK = 0, 1, 2  # kinds of training images of the policy


@dataclass(frozen=True, kw_only=True)
class GateLoss(AdversarialObjective):
    r"""The gate of a mixture [Bai2024]: an alpha for every image, from features of both
    classifiers.

    .. math:: c_{CE}\,\ell_{CE} + c_{BCE}\,\ell_{BCE}(\alpha_\theta, s) +
    c_{prod}\,\ell_{CE}\,\ell_{BCE}

    The composite loss [Bai2024, Eq. (4.2)] of every image, clean (s = 0) and attacked (s = 1). The
    model is a :class:`~equipoise.mixing.gated.GatedClassifier`; whatever its range, alpha is in (0,
    1) in the loss and in the attacks. Each image is attacked once per step, through the current
    gate:

    - A: PGD on the cross-entropy without the gate's gradient;
    - B: PGD through the gate;
    - C: APGD through the gate, on the cross-entropy or (mostly) on the DLR towards one of the nine
      likeliest other classes, or, with a share of its own, on the two hinges of that class
      (:func:`~equipoise.mixing.surrogates.hinge_sums`), as evaluations attack a map or hard labels.
      The hinges are those of the range of the model.

    The radius and the weight of a term that lowers alpha (B and C) are drawn per image, the number
    of steps per batch, from χ² with mean `steps`. A training step costs about steps + 4 passes with
    gradients through both classifiers and the gate.
    """

    name = "gate"
    compilable = False  # the number of steps is drawn on the host; the pass of an attack is captured separately
    detects_attacks = True

    adversary: str = setting("C", "Training attacks: A, B or C.", among=ADVERSARIES)
    c_ce: float = setting(0.0, "Weight of the cross-entropy of the mixture.", fraction=True)
    c_bce: float = setting(
        1.5, "Weight of the binary cross-entropy between clean and attacked.", fraction=True
    )
    c_prod: float = setting(0.2, "Weight of the product of both.", fraction=True)
    clean_weight: float = setting(
        1.0, "Weight of a clean image; an attacked one has 1.", fraction=True
    )
    steps: int = setting(15, "Gradient steps of the attacks, on average.", least=1)
    min_radius: float = setting(
        0.4, "Smallest radius, in units of eps.", fraction=True, positive=True
    )
    max_radius: float = setting(
        1.1, "Largest radius, in units of eps.", fraction=True, positive=True
    )
    alpha_penalty: float = setting(
        0.4, "Largest weight of the term of the attacks that lowers alpha.", share=True
    )
    untargeted_share: float = setting(0.1, "Share of untargeted attacks in C.", share=True)
    hinge_share: float = setting(
        0.0,
        "Share of the targeted attacks in C on both sides at once, by two hinges per target.",
        share=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.min_radius <= self.max_radius,
            "min_radius",
            f"be at most max_radius, {self.max_radius:g}",
            self.min_radius,
        )

    def describe(self) -> dict[str, Any]:
        """Of version 2 with `hinge_share`: behind a switch the hinges once did not move h towards
        the target."""
        return {**super().describe(), "version": 2 if self.hinge_share > 0 else self.version}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        if not isinstance(model, GatedClassifier):
            raise checks.InputError(
                f"`model` must be a GatedClassifier, got {type(model).__name__}"
            )
        x_adv = self.attack(model, x, y, stream)
        # In one pass, so that the batch statistics of the gate cover clean and attacked images.
        g, h, z = model.log_probabilities_and_gate(torch.cat((x, x_adv)))
        logits, labels = mix(g, h, z), torch.cat((y, y))
        ce = losses.cross_entropy(logits, labels)
        bce = torch.cat(
            (F.softplus(z[: len(x)]), F.softplus(-z[len(x) :]))
        )  # clean images, then attacked ones
        clean, attacked = (self.c_ce * ce + self.c_bce * bce + self.c_prod * ce * bce).chunk(2)
        correct = correct_predictions(logits, labels).chunk(2)[1]
        return ObjectiveOutput(
            (self.clean_weight * clean + attacked) / (1 + self.clean_weight), correct
        )

    def attack(self, model: GatedClassifier, x: Tensor, y: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) every image attacked at its own radius."""
        eps = self.eps * stream.at("radius").uniform(low=self.min_radius, high=self.max_radius).to(
            x.dtype
        )
        penalty = stream.at("term").uniform(high=self.alpha_penalty).to(x.dtype) * (
            self.adversary != "A"
        )
        steps = self.draw_steps(stream)
        start = random_start(x, self.norm, eps, stream.at("start"))
        with inference(model):
            others: list[Tensor] = []
            if self.adversary == "C":
                others.append(self.draw_targets(model, x, y, stream))
                if self.hinge_share > 0:
                    others.append(stream.at("hinges").uniform() < self.hinge_share)
            loss = loss_and_gradient(model, x, self.attack_loss, self)

            def evaluate(point: Tensor) -> tuple[Tensor, ...]:
                return loss(point, y, penalty, *others)

            if self.adversary == "C":
                return apgd_maximize(evaluate, x, start, norm=self.norm, eps=eps, steps=steps)
            return inner_pgd(evaluate, x, start, norm=self.norm, eps=eps, steps=steps)[-1]

    def attack_loss(
        self,
        model: GatedClassifier,
        x: Tensor,
        y: Tensor,
        penalty: Tensor,
        target: Tensor | None = None,
        by_hinges: Tensor | None = None,
    ) -> Tensor:
        """(B,) what the attacks maximise; `target` (B,) is −1 where the attack is untargeted."""
        outputs = model.base_outputs(x)
        g, h = model.sides_of_logits(*outputs[:2], soft=True)
        z = outputs[2]
        logits = mix(g, h, z.detach() if self.adversary == "A" else z)
        value = losses.cross_entropy(logits, y)
        if target is not None:
            targeted = losses.targeted_dlr(logits, y, target.clamp_min(0))
            if by_hinges is not None:
                targeted = torch.where(
                    by_hinges, -_hinges(model, outputs, y, target.clamp_min(0)), targeted
                )
            value = torch.where(target < 0, value, targeted)
        return (1 - penalty) * value + penalty * F.softplus(-z)

    def draw_targets(self, model: GatedClassifier, x: Tensor, y: Tensor, stream: Stream) -> Tensor:
        """(B,) a likely other class for every image, −1 for those that are attacked untargeted."""
        with torch.no_grad():
            others = classes_by_logit(mix(*model.log_probabilities_and_gate(x)), y)
        rank = stream.at("target").integers(min(9, others.shape[1]))
        target = others.gather(1, rank.unsqueeze(1)).squeeze(1)
        return torch.where(stream.at("kind").uniform() < self.untargeted_share, -1, target)

    def draw_steps(self, stream: Stream) -> int:
        """Number of steps for this batch: χ² with `steps` degrees of freedom, by the stream of its
        first image."""
        chi_squared = float(stream[:1].at("steps").normal(self.steps).square().sum())
        return min(max(round(chi_squared), 1), 3 * self.steps)


def _hinges(model: GatedClassifier, outputs: Sequence[Tensor], y: Tensor, target: Tensor) -> Tensor:
    """(B,) how far a mixture is from the target by g, as
    :class:`~equipoise.evaluation.hinge_attack.TargetedHinges`."""
    rivals = 1.0 if model.logit_map is None else model.logit_map.settings.rivals
    sums = hinge_sums(
        Sides(model).from_base_outputs(*outputs),
        y,
        "mapped",
        reserve=RESERVES[model.hard],
        rivals=rivals,
    )
    return sums.gather(1, target.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(AdversarialObjective):
    r"""The policy of adaptive smoothing [Bai2022]: which of two classifiers to trust, from attacks
    on either.

    .. math:: (\ell_{CE} + c_1)\,\big(c_2 + (c_3 - s\,\beta_\theta(x))_+\big)

    [Bai2022, Eq. (9)]: s = 1 (trust h) for attacks with target γ_t ≤ γ_0, s = −1 (trust g) for
    those beyond and for clean images. The sentence after (9) has the two cases the other way round;
    Figure 4 and the definition of the target before it do not. Images attacked through the policy
    itself, by a random number of steps, have no such target: for them the loss is the cross-entropy
    alone.

    The paper derives (9) from two simpler losses, which can be had instead: `direct`, the
    cross-entropy of the adaptive classifier (7) for all images [Eq. (8)], and `supervised`, the
    hinge on β alone; images attacked through the policy have no target and do not count there. The
    paper leaves the supervised loss open; the hinge is that of (9).

    The model is an :class:`~equipoise.local_smoothing.policy.AdaptiveSmoothing`. The paper does not
    say how often each kind of image occurs; here clean images and those attacked through the policy
    have a share each.
    """

    name = "policy"
    compilable = False
    detects_attacks = True

    loss: str = setting(
        "composite",
        "composite (Eq. (9)), direct (Eq. (8), the cross-entropy alone) or supervised "
        "(the hinge alone).",
        among=("composite", "direct", "supervised"),
    )
    gamma_0: float = setting(
        55.0, "Strength where the attacked accuracies cross.", fraction=True, positive=True
    )
    c1: float = setting(0.5, "Added to the cross-entropy.", fraction=True)
    c2: float = setting(0.8, "Added to the hinge.", fraction=True)
    c3: float = setting(3.2, "Margin of the hinge on β.", fraction=True)
    clean_share: float = setting(0.25, "Share of clean images.", share=True)
    policy_share: float = setting(0.25, "Share of images attacked through the policy.", share=True)
    steps: int = setting(10, "Gradient steps of the attacks.", least=1)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        assert isinstance(model, AdaptiveSmoothing)
        kinds, targets = self.draw_kinds(stream)
        logits, beta = model.logits_and_beta(self.attack(model, x, y, targets, kinds, stream))
        ce = losses.cross_entropy(logits, y)
        side = torch.where((kinds == TARGETED_ATTACK) & (targets <= self.gamma_0), 1.0, -1.0)
        hinge = torch.relu(self.c3 - side * beta)
        with_target, without = {
            "composite": ((ce + self.c1) * (self.c2 + hinge), ce),
            "direct": (ce, ce),
            "supervised": (hinge, torch.zeros_like(ce)),
        }[self.loss]
        return ObjectiveOutput(
            torch.where(kinds == POLICY_ATTACK, without, with_target),
            correct_predictions(logits, y),
        )

    def draw_kinds(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(B,) the kind of each image, and (B,) the γ_t of the targeted attacks."""
        draw = stream.at("kind").uniform()
        attacked = torch.where(
            draw < self.clean_share + self.policy_share, POLICY_ATTACK, TARGETED_ATTACK
        )
        kinds = torch.where(draw < self.clean_share, CLEAN, attacked)
        targets = torch.tensor(TARGETS, dtype=torch.float64, device=draw.device)
        return kinds, targets[stream.at("target").integers(len(TARGETS))]

    def attack(
        self,
        model: AdaptiveSmoothing,
        x: Tensor,
        y: Tensor,
        targets: Tensor,
        kinds: Tensor,
        stream: Stream,
    ) -> Tensor:
        """(B, C, H, W) every image attacked according to its kind, in one run of PGD."""
        gate, through_policy = log_strength(targets), kinds == POLICY_ATTACK
        with inference(model):
            evaluate = ascent.value_and_gradient(
                lambda point: losses.cross_entropy(
                    model.logits_and_beta(point, gate, through_policy)[0], y
                )
            )
            iterates = inner_pgd(evaluate, x, x, norm=self.norm, eps=self.eps, steps=self.steps)
        steps = torch.where(through_policy, 1 + stream.at("steps").integers(self.steps), self.steps)
        steps = torch.where(kinds == CLEAN, 0, steps)
        return torch.stack(iterates)[steps, torch.arange(len(x), device=x.device)]
