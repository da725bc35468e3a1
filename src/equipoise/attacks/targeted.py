"""APGD-T [Croce2020]: APGD on the targeted difference of logits ratio, one target class after
another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.apgd import ApgdSearch
from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.suite import Attack
from equipoise.core import checks, geometry, losses
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

ORDERS = ("logits", "distance")
RANKS = tuple(range(1, 10))
MAX_RANKED = 18  # classes whose order is kept, and whose distance is measured; others are taken by their logits


@dataclass(frozen=True)
class TargetedApgd(Attack):
    """APGD towards other classes, one after another.

    Args:
        steps: gradient steps per target.
        ranks: which classes, 1 being the likeliest; those that a model does not have are left out.
        order: likeliest by the logits of the clean image, or by the distance to the linearised
            boundary [MALT2024], which is better where some classes are far more sensitive than
            others.
    """

    name: ClassVar[str] = "targeted"
    steps: int = 100
    ranks: tuple[int, ...] = RANKS
    order: str = "logits"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.one_of("order", self.order, ORDERS)

    def stages(self) -> tuple[Stage, ...]:
        """One per target, such as targeted-1@20-distance; the random start has the same purpose in
        both orders."""
        starts = {
            rank: f"targeted-{rank}" + ("" if self.steps == 100 else f"@{self.steps}")
            for rank in self.ranks
        }
        suffix = "" if self.order == "logits" else f"-{self.order}"
        return tuple(
            self.stage(
                start + suffix,
                partial(self._search, rank, start),
                self.steps,
                group=(self.name, self.steps),
            )
            for rank, start in starts.items()
        )

    def _search(
        self, rank: int, purpose: str, source: GradientSource, threat: Threat, stop_at_success: bool
    ) -> ApgdSearch | None:
        if rank >= source.classes:
            return None

        return ApgdSearch(
            source,
            threat,
            self.steps,
            purpose,
            "targeted",
            losses.targeted_dlr,
            partial(choose_targets, source, threat.norm, self.order, rank),
        )


def choose_targets(
    source: GradientSource, norm: str, order: str, rank: int, x: Tensor, y: Tensor, stream: Stream
) -> Tensor:
    """(B,) the class of that rank for every image."""
    if rank > MAX_RANKED:
        return classes_by_logit(source.logits(x), y)[:, rank - 1]
    if order == "logits":
        return source.once_per_image(
            "classes by logit",
            stream.index,
            lambda: classes_by_logit(source.logits(x), y)[:, :MAX_RANKED],
        )[:, rank - 1]
    return classes_by_distance(source, x, y, stream.index, norm)[:, rank - 1]


def first_ranks(targets: int) -> tuple[int, ...]:
    """The ranks of so many targets."""
    return tuple(range(1, checks.whole("targets", targets, least=1, most=1000) + 1))


def check_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks as a tuple; an error unless they are whole numbers from 1 on."""
    return tuple(checks.whole("ranks", rank, least=1) for rank in ranks)


def logit_difference(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """z_t − z_y: positive where the target wins."""
    return (z.gather(1, target.unsqueeze(1)) - z.gather(1, y.unsqueeze(1))).squeeze(1)


def classes_by_logit(logits: Tensor, y: Tensor) -> Tensor:
    """(B, K − 1) the classes other than y, from the highest logit to the lowest."""
    # A hard decision has logits of −inf; they still rank above the true class, which comes last and
    # is cut off.
    others = logits.nan_to_num(neginf=torch.finfo(logits.dtype).min).scatter(
        1, y.unsqueeze(1), -torch.inf
    )
    return others.argsort(dim=1, descending=True, stable=True)[:, :-1]


def classes_by_distance(
    source: GradientSource, x: Tensor, y: Tensor, index: Tensor, norm: str
) -> Tensor:
    """(B, R) likeliest other classes by (z_y − z_j) / ‖∇(z_y − z_j)‖ in the dual norm [MALT2024],
    smallest first.

    R is K − 1, but at most :data:`MAX_RANKED`. Every target needs it, so it is computed once per
    image.
    """

    def compute() -> Tensor:
        order = classes_by_logit(source.logits(x), y)[:, :MAX_RANKED]
        value_and_gradient = source.value_and_gradient(
            "difference", logit_difference, with_extra=False
        )
        distances = []
        for rank in range(order.shape[1]):
            difference, gradient, *_ = value_and_gradient(x, y, order[:, rank])
            distances.append(-difference / geometry.dual_norm(gradient, norm).clamp_min(1e-12))
        return order.gather(1, torch.stack(distances, dim=1).argsort(dim=1, stable=True))

    return source.once_per_image(norm, index, compute)
