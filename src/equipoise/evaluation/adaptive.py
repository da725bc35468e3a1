"""Attacks that know how a mixture is built: its own gradients are hidden behind a map, a hard
decision or a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from equipoise.attacks import Apgd, Attack, Square, Suite, TargetedApgd, straight_through
from equipoise.core import checks
from equipoise.evaluation.hinge_attack import TargetedHinges
from equipoise.mixing import AlphaPenalty, CascadedClassifier, GatedClassifier, MixedClassifier
from equipoise.mixing.cascade import BothStages, FirstView
from equipoise.mixing.surrogates import Sides
from equipoise.models import check_forward

ADAPTIVE_VERSION = 5  # of all lists here, for folders that only name their attack
OWN_GRADIENTS = "own-gradients"  # kind of attack on a mixture: without its adaptive version
KINDS = {"surrogate": "adaptive", "through": "adaptive-through"}  # with their names in rows
BOTH_SIDES: tuple[Attack, ...] = (
    Apgd(loss="ce", steps=30),
    Apgd(loss="dlr", steps=30),
    TargetedApgd(steps=20, ranks=(1, 2, 3)),
)
TEMPERED: tuple[Attack, ...] = (
    Apgd(loss="margin", steps=30),
    TargetedApgd(steps=20, ranks=(1, 2, 3)),
)
FIRST_STAGE: tuple[Attack, ...] = (Apgd(loss="margin", steps=30), TargetedApgd(steps=30))
SHORT, LONG = 20, 100  # steps of a run
LONG_RUNS: tuple[Attack, ...] = (
    Apgd(loss="relative-margin", steps=LONG),
    TargetedApgd(steps=LONG, ranks=(1, 2, 3), order="distance"),
)


def adaptive_attacks(
    mixture: MixedClassifier,
    attack: Attack,
    kinds: Sequence[str] = ("surrogate",),
    stand_in: nn.Module | None = None,
    *,
    thorough: bool = True,
) -> dict[str, Attack]:
    """The adaptive attacks on a mixture by their name in rows.

    The kind `surrogate` takes gradients from the auxiliary mixture [Bai2024nuts, Eq. (8)] where
    those of the mixture are hidden, and a suite gets more members that attack both sides at once;
    `through` passes the auxiliary gradients straight through the mixture itself [B.2.2]. Success is
    decided by the mixture alone. A single attack on plain mixing, which has useful gradients, has
    no such version; that of a suite includes the mixture's own gradients. Against a gate the
    attacks come once more with a term that lowers alpha (adversary D of [Bai2024]), and are named
    so. A differentiable `stand_in` replaces a base without gradients; `thorough` is that of
    :func:`white_box`.
    """
    for kind in kinds:
        checks.one_of("adaptive", kind, KINDS)
    available = {"surrogate": white_box(mixture, attack, stand_in, thorough=thorough)}
    if not mixture.differentiable:
        through = straight_through(mixture, mixture.surrogate(stand_in=stand_in))
        available["through"] = replace(attack, surrogate=through)
    selected = {KINDS[kind]: available[kind] for kind in kinds if kind in available}
    lowered = (
        {
            f"{name}-lowered": replace(with_long_runs(mixture, own), extra=AlphaPenalty(mixture))
            for name, own in selected.items()
        }
        if isinstance(mixture, GatedClassifier)
        else {}
    )
    # Left out if nothing was added to it: it is the attack itself.
    return {name: own for name, own in selected.items() if own is not attack} | lowered


def white_box(
    mixture: MixedClassifier,
    attack: Attack,
    stand_in: nn.Module | None = None,
    both_sides: Sequence[Attack] = BOTH_SIDES,
    *,
    thorough: bool = True,
) -> Attack:
    """The attack with the mixture's own gradients, or with those of its surrogate where they are
    hidden.

    A suite also attacks both sides at once: with `both_sides` on scores, then every target by its
    two hinges (:func:`hinge_attacks`). Plain mixing needs it as well, with one alpha or a gate: the
    softmax of a confident g hides the way to another class. A steep gate hides its gradient in
    places, so that a suite also gets `both_sides` on a surrogate with a smoother gate.

    Where a map or hard labels hide the gradients, a suite also uses a surrogate at the temperature
    of the map. The long runs of the hinges take the place of those that it makes on images with a
    small margin, because the margin of a hard decision says little about what is left to do. A
    cascade is also attacked by its stages (:func:`_by_stages`), and a single attack on it becomes a
    suite.

    Unless it is `thorough`, there is nothing beyond `both_sides` (and the stages of a cascade): for
    comparing many candidates.
    """

    def on_both_sides() -> Suite:
        hinges = hinge_attacks(mixture, attack, stand_in) if thorough else ()
        return Suite(
            attacks=(*both_sides, *hinges),
            name="hinges",
            surrogate=mixture.hinges(stand_in=stand_in),
            follow="surrogate",
        )

    if not mixture.differentiable:
        members = [on_both_sides()]
        if thorough and mixture.logit_map is not None and not isinstance(mixture, GatedClassifier):
            tempered = mixture.tempered_surrogate(stand_in=stand_in)
            members.insert(
                0, Suite(attacks=TEMPERED, name="tempered", surrogate=tempered, follow="surrogate")
            )
        if isinstance(mixture, CascadedClassifier):
            attack, members = _as_suite(attack), [*_by_stages(mixture), *members]
        if thorough:
            members += _by_own_gradients(mixture, attack)
        short = _without_runs_by_margin(attack) if thorough else attack
        return replace(
            _insert_before_square(short, *members), surrogate=mixture.surrogate(stand_in=stand_in)
        )
    added: list[Suite] = []
    if isinstance(mixture, GatedClassifier) and mixture.steeper_than_trained:
        added.append(
            Suite(
                attacks=tuple(both_sides),
                name="gentle",
                surrogate=mixture.surrogate(),
                follow="surrogate",
            )
        )
    if isinstance(mixture, GatedClassifier) or 0 < mixture.alpha < 1:
        added.append(on_both_sides())
    return _insert_before_square(attack, *added) if added else attack


def hinge_attacks(
    mixture: MixedClassifier, attack: Attack, stand_in: nn.Module | None = None
) -> tuple[Attack, ...]:
    """Both hinges of every target class, as thorough as the suite: short runs first, long ones for
    the survivors.

    A suite that makes long runs on every image, such as AutoAttack, gets them for all targets, in
    both forms by APGD and in one by momentum. The fast one gets them for the three targets that a
    few steps come nearest to, in one form by both, and one with even shorter runs gets none.
    """
    hinges, steps = (
        TargetedHinges(surrogate=Sides(mixture, stand_in), follow="surrogate"),
        _steps_on_all_images(attack),
    )
    by_momentum = replace(hinges, steps=LONG, forms=("mapped",), optimizer="momentum")
    if steps >= LONG:
        return replace(hinges, steps=LONG), by_momentum
    short = replace(hinges, steps=min(steps, SHORT) or SHORT, forms=("mapped",))
    if 0 < steps < SHORT:
        return (short,)
    long = (replace(short, steps=LONG), by_momentum)
    return (short, *(replace(run, ranks=(1, 2, 3), order="attacked") for run in long))


def with_long_runs(mixture: GatedClassifier, attack: Attack) -> Attack:
    """The attack on a gate with long runs on every survivor.

    An attack first moves the bases, and only later the gate: short runs leave alpha far higher than
    long ones.
    """
    gentle = mixture.surrogate() if mixture.steeper_than_trained else None
    runs = LONG_RUNS if _steps_on_all_images(attack) < LONG else LONG_RUNS[:1]
    return _insert_before_square(
        attack, Suite(attacks=tuple(replace(run, surrogate=gentle) for run in runs), name="long")
    )


def _by_stages(mixture: CascadedClassifier) -> list[Suite]:
    """Attacks on the stages of a cascade: the first view, to be sure of a wrong class, and both, to
    be unsure or wrong.

    The hinges of other members add g: they make every stage leave the decision to it.
    """
    return [
        Suite(
            attacks=FIRST_STAGE,
            name="first-stage",
            surrogate=FirstView(mixture.robust),
            follow="surrogate",
        ),
        Suite(
            attacks=TEMPERED, name="both-stages", surrogate=BothStages(mixture), follow="surrogate"
        ),
    ]


def _as_suite(attack: Attack) -> Attack:
    """A single attack by gradients as a suite, which can get more members; one that measures radii
    stays alone."""
    alone = isinstance(attack, Suite | Square) or attack.measures_radius
    return attack if alone else Suite(attacks=(attack,), eot=attack.eot, repeats=attack.repeats)


def _steps_on_all_images(attack: Attack) -> int:
    """The most gradient steps that one run of a suite makes on every image that survives to it."""
    members = attack.attacks if isinstance(attack, Suite) else (attack,)
    return max(
        (getattr(member, "steps", 0) for member in members if member.margin_ratio_below is None),
        default=0,
    )


def _by_own_gradients(mixture: MixedClassifier, attack: Attack) -> list[Suite]:
    """The short gradient runs of a suite by the mixture's own gradients: weak, but they may see
    what others miss."""
    short = _without_runs_by_margin(attack)
    runs = (
        tuple(run for run in short.attacks if not isinstance(run, Square))
        if isinstance(short, Suite)
        else ()
    )
    return [Suite(attacks=runs, name="own-gradients", surrogate=mixture)] if runs else []


def _without_runs_by_margin(attack: Attack) -> Attack:
    """A suite without the members that attack only images with a small margin."""
    if not isinstance(attack, Suite):
        return attack
    return replace(
        attack,
        attacks=tuple(member for member in attack.attacks if member.margin_ratio_below is None),
    )


def _insert_before_square(attack: Attack, *added: Attack) -> Attack:
    """Add members to a suite before Square, which should find nothing that gradients missed."""
    if not isinstance(attack, Suite):
        return attack
    members = attack.attacks
    place = next((i for i, other in enumerate(members) if isinstance(other, Square)), len(members))
    return replace(attack, attacks=(*members[:place], *added, *members[place:]))


class HardLabelWrapper(nn.Module):
    """A model that returns classes as one that returns logits: 1 for its class, −1 for the
    others."""

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model, self.num_classes = model, num_classes
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return 2 * nn.functional.one_hot(self.model(x).long(), self.num_classes).to(x.dtype) - 1


def with_logits(name: str, model: nn.Module, num_classes: int, image: Tensor) -> nn.Module:
    """The model itself, or a :class:`HardLabelWrapper` if it returns classes for the image (1, C,
    H, W)."""
    output = check_forward(name, model.to(image.device), image)
    is_class = output.dim() == 1 and not output.is_floating_point()
    return HardLabelWrapper(model, num_classes) if is_class else model
