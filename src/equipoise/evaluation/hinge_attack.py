"""Attacks on both sides of a mixture at once, one target class after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from equipoise.attacks import Attack
from equipoise.attacks.apgd import ApgdSearch
from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.momentum import MomentumSearch
from equipoise.attacks.targeted import RANKS, check_ranks
from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.mixing.surrogates import FORMS, RESERVES, Sides, hinge_sums

OPTIMIZERS: dict[str, type[ApgdSearch] | type[MomentumSearch]] = {"apgd": ApgdSearch, "momentum": MomentumSearch}


@dataclass(frozen=True)
class TargetedHinges(Attack):
    """Gradient steps that lower both hinges of a target class (:func:`~equipoise.mixing.surrogates.hinge_sums`).

    Its surrogate is the :class:`~equipoise.mixing.surrogates.Sides` of the mixture, and it follows the surrogate.

    Args:
        steps: gradient steps per target and form.
        ranks: which classes, 1 being the nearest by the hinges of the clean image.
        forms: of the robust side's hinge; every one is a start of its own.
        optimizer: apgd or momentum.
    """

    name: ClassVar[str] = "targeted-hinges"
    version: ClassVar[int] = 2
    steps: int = 100
    ranks: tuple[int, ...] = RANKS
    forms: tuple[str, ...] = FORMS
    optimizer: str = "apgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        for form in self.forms:
            checks.one_of("forms", form, FORMS)
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        checks.instance("surrogate", self.surrogate, Sides, "be the sides of a mixture")
        checks.require(self.follow == "surrogate", "follow", "be surrogate: the objective reads its sides", self.follow)

    def stages(self) -> tuple[Stage, ...]:
        """One per form and target, such as mapped-1 and mapped-1@20-momentum."""
        suffix = "" if self.steps == 100 else f"@{self.steps}"
        suffix += "" if self.optimizer == "apgd" else f"-{self.optimizer}"
        return tuple(self.stage(f"{form}-{rank}{suffix}", partial(self._search, form, rank, f"{form}-{rank}{suffix}"),
                                self.steps, group=(self.name, self.optimizer, form, self.steps))
                     for form in self.forms for rank in self.ranks)

    def _search(self, form: str, rank: int, purpose: str, source: GradientSource, threat: Threat,
                stop_at_success: bool) -> ApgdSearch | MomentumSearch | None:
        if rank >= source.classes:
            return None
        assert isinstance(self.surrogate, Sides)
        mixture = self.surrogate.mixture
        rivals = 1.0 if mixture.logit_map is None else mixture.logit_map.settings.rivals
        sums = partial(hinge_sums, form=form, reserve=RESERVES[mixture.hard], rivals=rivals, stages=mixture.stages)

        def objective(sides: Tensor, y: Tensor, target: Tensor) -> Tensor:
            return -sums(sides, y).gather(1, target.unsqueeze(1)).squeeze(1)

        def choose_targets(x: Tensor, y: Tensor, stream: Stream) -> Tensor:
            def nearest() -> Tensor:
                others = sums(source.source_outputs(x), y).scatter(1, y.unsqueeze(1), float("inf"))
                return others.argsort(dim=1, stable=True)[:, : max(self.ranks)]

            return source.once_per_image(f"classes by hinges, {form}, {max(self.ranks)}", stream.index,
                                         nearest)[:, rank - 1]

        return OPTIMIZERS[self.optimizer](source, threat, self.steps, purpose, f"hinges-{form}", objective,
                                          choose_targets)
