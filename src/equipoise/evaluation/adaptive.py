"""Attacks that know how a mixture is built: its own gradients hide behind a map and a hard decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, FunctionAttack, Square, Stage, Suite, Targeted, straight_through
from equipoise.attacks.gradients import Extra
from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.evaluation.job import Attack
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.gated_surrogate import AlphaPenalty

KINDS = ("surrogate", "through")
NAMES = {"surrogate": "adaptive", "through": "adaptive-through"}
DEFAULT = ("surrogate",)
BOTH: tuple[Stage, ...] = (Apgd("ce", 30), Apgd("dlr", 30), *(Targeted(rank, 20) for rank in range(1, 4)))


def aimed(chosen: Callable[..., Tensor] | Suite, surrogate: nn.Module | None) -> Attack:
    """An attack with gradients from elsewhere."""
    if isinstance(chosen, Suite):
        return replace(chosen, surrogate=surrogate)
    return partial(chosen, surrogate=surrogate)


def adaptive(
    mixture: MixedClassifier, chosen: Callable[..., Tensor] | Suite, kinds: Sequence[str] = DEFAULT,
    stand_in: nn.Module | None = None, precision: str = "auto",
) -> dict[str, Attack]:
    """The adaptive attacks on a mixture, by the name they get in the rows; none on one that hides nothing.

    Against a gate they come with a term that pushes alpha down (adversary D of [Bai2024]), their names saying so.

    Args:
        mixture: what is attacked; it alone decides success.
        chosen: the attack whose gradients are replaced.
        kinds: `surrogate` follows the auxiliary mixture [Bai2024nuts, Eq. (8)], and a list of attacks gets one
            more that pushes both sides at once; `through` passes the auxiliary gradients straight through the
            mixture itself [B.2.2].
        stand_in: a model with gradients in place of an accurate one without.
        precision: of the gradients of the attack on both sides.
    """
    for kind in kinds:
        checks.one_of("adaptive", kind, KINDS)
    if mixture.differentiable and not isinstance(mixture, GatedClassifier):
        return {}
    made = {"surrogate": white_box(mixture, chosen, stand_in, precision)}
    if not mixture.differentiable:
        made["through"] = aimed(chosen, straight_through(mixture, mixture.surrogate(stand_in=stand_in)))
    found = {NAMES[kind]: made[kind] for kind in kinds if kind in made}
    if isinstance(mixture, GatedClassifier):
        lowered = {f"{name}-lowered": with_extra(attack, AlphaPenalty(mixture)) for name, attack in found.items()}
        # The plain attack is in every evaluation; where it has no gradients, the surrogate's is wanted too.
        return lowered if mixture.differentiable else {**found, **lowered}
    return found


def white_box(mixture: MixedClassifier, chosen: Callable[..., Tensor] | Suite, stand_in: nn.Module | None = None,
              precision: str = "auto", both: Sequence[Stage] = BOTH) -> Attack:
    """The attack with the mixture's own gradients, or where it hides them with those of what stands in for it.

    `both` are then the stages of the attack on both sides, which a list of attacks gets besides. A steep gate hides
    its gradient only in places: there a list keeps the mixture's own and gets the same stages behind a gentle gate.
    """
    if not mixture.differentiable:
        hinges = Suite(tuple(both), surrogate=mixture.hinges(stand_in=stand_in), follow="surrogate")
        return aimed(_with_stage(chosen, "hinges", hinges, precision), mixture.surrogate(stand_in=stand_in))
    if isinstance(mixture, GatedClassifier) and mixture.steep:
        gentle = Suite(tuple(both), surrogate=mixture.surrogate(), follow="surrogate")
        chosen = _with_stage(chosen, "gentle", gentle, precision)
    return aimed(chosen, None)


def with_extra(chosen: Callable[..., Tensor] | Suite, extra: Extra) -> Attack:
    """An attack with a further term."""
    if isinstance(chosen, Suite):
        return replace(chosen, extra=extra)
    return partial(chosen, extra=extra)


def _with_stage(chosen: Callable[..., Tensor] | Suite, name: str, fold: Suite, precision: str,
                ) -> Callable[..., Tensor] | Suite:
    """The list with another one before Square, which should find nothing that gradients missed."""
    if not isinstance(chosen, Suite):
        return chosen

    def called(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, extra: Extra | None = None,
               **other: object) -> Tensor:
        return replace(fold, extra=extra)(model, x, y, threat=threat, stream=stream, precision=precision)

    cost = sum(float(getattr(stage, "cost", 1)) for stage in fold.stages)
    last = next((at for at, stage in enumerate(chosen.stages) if isinstance(stage, Square)), len(chosen.stages))
    return replace(chosen, stages=(*chosen.stages[:last], FunctionAttack(name, called, cost=cost), *chosen.stages[last:]))


class HardLabelWrapper(nn.Module):
    """A model that answers with classes, as one that answers with logits: 1 for its class, −1 for the others."""

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model, self.num_classes = model, num_classes
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return 2 * nn.functional.one_hot(self.model(x).long(), self.num_classes).to(x.dtype) - 1


def with_logits(model: nn.Module, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """The model itself, or :class:`HardLabelWrapper` if it answers with classes."""
    try:
        with inference(model), torch.no_grad():
            told = model(torch.zeros(1, *image_shape))
    except Exception:  # what a foreign model objects to is said where it is evaluated
        return model
    return HardLabelWrapper(model, num_classes) if isinstance(told, Tensor) and told.dim() == 1 else model
