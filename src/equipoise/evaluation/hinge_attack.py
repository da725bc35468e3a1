"""Attacks on both sides of a mixture at once, one target class after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.attacks import Attack
from equipoise.attacks.apgd import ApgdSearch
from equipoise.attacks.cuda_graphs import TensorFunction
from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import VERDICT_BLOCK, GradientSource
from equipoise.attacks.momentum import MomentumSearch
from equipoise.attacks.targeted import RANKS, check_ranks
from equipoise.core import checks, geometry
from equipoise.core.ascent import follow_gradient, last
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.mixing.surrogates import FORMS, RESERVES, Sides, hinge_sums

ORDERS = ("clean", "attacked")
TRIAL_STEPS = 5  # towards every class, to find the order of those attacked
OPTIMIZERS: dict[str, type[ApgdSearch] | type[MomentumSearch]] = {
    "apgd": ApgdSearch,
    "momentum": MomentumSearch,
}


@dataclass(frozen=True)
class TargetedHinges(Attack):
    """Gradient steps that lower both hinges of a target class
    (:func:`~equipoise.mixing.surrogates.hinge_sums`).

    Its surrogate is the :class:`~equipoise.mixing.surrogates.Sides` of the mixture, and it follows
    the surrogate.

    Args:
        steps: gradient steps per target and form.
        ranks: which classes, 1 being the nearest.
        order: nearest by the hinges of the clean image, or by what is left of them after a few
            steps towards each of the nearest :data:`~equipoise.attacks.targeted.RANKS`.
        forms: of the robust side's hinge; every one is a start of its own.
        optimizer: apgd or momentum.
    """

    name: ClassVar[str] = "targeted-hinges"
    version: ClassVar[int] = 3
    steps: int = 100
    ranks: tuple[int, ...] = RANKS
    order: str = "clean"
    forms: tuple[str, ...] = FORMS
    optimizer: str = "apgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.one_of("order", self.order, ORDERS)
        for form in self.forms:
            checks.one_of("forms", form, FORMS)
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        checks.instance("surrogate", self.surrogate, Sides, "be the sides of a mixture")
        checks.require(
            self.follow == "surrogate",
            "follow",
            "be surrogate: the objective reads its sides",
            self.follow,
        )

    def stages(self) -> tuple[Stage, ...]:
        """One per form and target, such as mapped-1 and mapped-1@20-momentum; of both orders with
        the same start."""
        suffix = "" if self.steps == 100 else f"@{self.steps}"
        suffix += "" if self.optimizer == "apgd" else f"-{self.optimizer}"
        order, trial = (
            ("", 0) if self.order == "clean" else (f"-{self.order}", len(RANKS) * (TRIAL_STEPS + 1))
        )
        # The trial is counted once for every form, also where the order is known from another run.
        return tuple(
            self.stage(
                f"{form}-{rank}{suffix}{order}",
                partial(self._search, form, rank, f"{form}-{rank}{suffix}"),
                self.steps + trial * (rank == self.ranks[0]),
                group=(self.name, self.optimizer, form, self.steps, self.order),
            )
            for form in self.forms
            for rank in self.ranks
        )

    def describe(self) -> dict[str, Any]:
        """See :meth:`Attack.describe`; without the order of the clean image, which was the only one
        once."""
        described = super().describe()
        return {
            key: value for key, value in described.items() if key != "order" or value != "clean"
        }

    def _search(
        self,
        form: str,
        rank: int,
        purpose: str,
        source: GradientSource,
        threat: Threat,
        stop_at_success: bool,
    ) -> ApgdSearch | MomentumSearch | None:
        if rank >= source.classes:
            return None
        assert isinstance(self.surrogate, Sides)
        mixture = self.surrogate.mixture
        rivals = 1.0 if mixture.logit_map is None else mixture.logit_map.settings.rivals
        sums = partial(
            hinge_sums,
            form=form,
            reserve=RESERVES[mixture.hard],
            rivals=rivals,
            stages=mixture.stages,
        )

        def objective(sides: Tensor, y: Tensor, target: Tensor) -> Tensor:
            return -sums(sides, y).gather(1, target.unsqueeze(1)).squeeze(1)

        name, count = (
            f"hinges-{form}",
            max(self.ranks) if self.order == "clean" else max(*self.ranks, *RANKS),
        )
        size = source.block and min(source.block, VERDICT_BLOCK)  # in multiples of which rows start
        trial = source.in_blocks(size).value_and_gradient(name, objective)

        def nearest_classes(x: Tensor, y: Tensor) -> Tensor:
            others = sums(source.source_outputs(x), y).scatter(1, y.unsqueeze(1), float("inf"))
            classes = others.argsort(dim=1, stable=True)[:, : min(count, source.classes - 1)]
            if self.order == "clean":
                return classes
            # One shape to record
            parts = zip(*(rows.split(size or len(x)) for rows in (x, y, classes)), strict=True)
            return torch.cat([order_attacked(trial, *part, threat=threat) for part in parts])

        def choose_targets(x: Tensor, y: Tensor, stream: Stream) -> Tensor:
            return source.once_per_image(
                f"classes by hinges, {form}, {count}, {self.order}",
                stream.index,
                lambda: nearest_classes(x, y),
            )[:, rank - 1]

        return OPTIMIZERS[self.optimizer](
            source, threat, self.steps, purpose, name, objective, choose_targets
        )


def order_attacked(
    value_and_gradient: TensorFunction, x: Tensor, y: Tensor, classes: Tensor, *, threat: Threat
) -> Tensor:
    """(B, R) the same classes, in the order of the values that :data:`TRIAL_STEPS` reach, the
    highest first.

    Classes that are near to a clean image may be out of reach, and others may need few steps.
    """
    project, reached = partial(geometry.project, x=x, threat=threat), []
    for target in classes.unbind(dim=1):

        def evaluate(point: Tensor, target: Tensor = target) -> tuple[Tensor, ...]:
            return value_and_gradient(point, y, target)

        end = last(
            follow_gradient(
                evaluate,
                x,
                norm=threat.norm,
                step_size=2.5 * threat.eps / TRIAL_STEPS,
                steps=TRIAL_STEPS,
                project=project,
            )
        )
        reached.append(evaluate(end)[0])
    return classes.gather(
        1, torch.stack(reached, dim=1).argsort(dim=1, descending=True, stable=True)
    )
