"""Attacks that know how a mixture is built, whose own gradients are hidden behind a map and a hard decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from equipoise.attacks import Apgd, Attack, Square, Suite, TargetedApgd, straight_through
from equipoise.core import checks
from equipoise.mixing import AlphaPenalty, GatedClassifier, MixedClassifier
from equipoise.models import check_forward

KINDS = {"surrogate": "adaptive", "through": "adaptive-through"}  # with their names in rows
BOTH_SIDES: tuple[Attack, ...] = (Apgd(loss="ce", steps=30), Apgd(loss="dlr", steps=30),
                                  TargetedApgd(steps=20, ranks=(1, 2, 3)))


def adaptive_attacks(mixture: MixedClassifier, attack: Attack, kinds: Sequence[str] = ("surrogate",),
                     stand_in: nn.Module | None = None) -> dict[str, Attack]:
    """The adaptive attacks on a mixture by their name in rows; none for a mixture whose gradients are not hidden.

    The kind `surrogate` takes gradients from the auxiliary mixture [Bai2024nuts, Eq. (8)], and a suite gets one more
    member that attacks both sides at once; `through` passes the auxiliary gradients straight through the mixture itself
    [B.2.2]. Success is decided by the mixture alone. Against a gate the attacks come with a term that lowers alpha
    (adversary D of [Bai2024]), and are named so. A differentiable `stand_in` replaces a base without gradients.
    """
    for kind in kinds:
        checks.one_of("adaptive", kind, KINDS)
    if mixture.differentiable and not isinstance(mixture, GatedClassifier):
        return {}
    available = {"surrogate": white_box(mixture, attack, stand_in)}
    if not mixture.differentiable:
        through = straight_through(mixture, mixture.surrogate(stand_in=stand_in))
        available["through"] = replace(attack, surrogate=through)
    selected = {KINDS[kind]: available[kind] for kind in kinds if kind in available}
    if not isinstance(mixture, GatedClassifier):
        return selected
    lowered = {f"{name}-lowered": replace(own, extra=AlphaPenalty(mixture)) for name, own in selected.items()}
    # Every evaluation runs the plain attack; where the mixture has no gradients, the surrogate's is needed too.
    return lowered if mixture.differentiable else {**selected, **lowered}


def white_box(mixture: MixedClassifier, attack: Attack, stand_in: nn.Module | None = None,
              both_sides: Sequence[Attack] = BOTH_SIDES) -> Attack:
    """The attack with the mixture's own gradients, or with those of its surrogate where they are hidden.

    A suite then also attacks both sides at once, with `both_sides`. A steep gate hides its gradient only in places:
    there a suite keeps the mixture's own gradients and gets the same attacks on a surrogate with a smoother gate.
    """
    if not mixture.differentiable:
        hinges = Suite(attacks=tuple(both_sides), name="hinges", surrogate=mixture.hinges(stand_in=stand_in),
                       follow="surrogate")
        return replace(_insert_before_square(attack, hinges), surrogate=mixture.surrogate(stand_in=stand_in))
    if isinstance(mixture, GatedClassifier) and mixture.steeper_than_trained:
        gentle = Suite(attacks=tuple(both_sides), name="gentle", surrogate=mixture.surrogate(), follow="surrogate")
        return _insert_before_square(attack, gentle)
    return attack


def _insert_before_square(attack: Attack, member: Suite) -> Attack:
    """Add a member to a suite before Square, which should find nothing that gradients missed."""
    if not isinstance(attack, Suite):
        return attack
    members = attack.attacks
    place = next((i for i, other in enumerate(members) if isinstance(other, Square)), len(members))
    return replace(attack, attacks=(*members[:place], member, *members[place:]))


class HardLabelWrapper(nn.Module):
    """A model that returns classes as one that returns logits: 1 for its class, −1 for the others."""

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model, self.num_classes = model, num_classes
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return 2 * nn.functional.one_hot(self.model(x).long(), self.num_classes).to(x.dtype) - 1


def with_logits(name: str, model: nn.Module, num_classes: int, image: Tensor) -> nn.Module:
    """The model itself, or a :class:`HardLabelWrapper` if it returns classes for the image (1, C, H, W)."""
    output = check_forward(name, model.to(image.device), image)
    is_class = output.dim() == 1 and not output.is_floating_point()
    return HardLabelWrapper(model, num_classes) if is_class else model
