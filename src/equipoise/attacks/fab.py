r"""FAB-T [Croce2020b]: adversarial points of small norm by projecting onto linearised decision
boundaries.

With d₁, d₂ the smallest moves inside [0, 1] that take the current point and the clean image onto
the hyperplane where the linearised logits of y and the target are equal, and a = min(‖d₁‖/(‖d₁‖ +
‖d₂‖), 0.1):

.. math:: x_{t+1} = (1 - a)(x_t + 1.05\,d_1) + a\,(x_0 + 1.05\,d_2)

A point that fools the model goes back towards the image by a tenth. Only points of size eps or less
count; the result is the smallest perturbation, projected into the ball.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.search_state import SearchState
from equipoise.attacks.suite import Attack
from equipoise.attacks.targeted import ORDERS, RANKS, check_ranks, choose_targets, logit_difference
from equipoise.core import checks, geometry
from equipoise.core.geometry import where_rows
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

MAX_BIAS = 0.1  # largest pull of a step towards the clean image
OVERSHOOT = 1.05
BACKWARD = 0.9  # an adversarial point goes back by a tenth of its perturbation


@dataclass(frozen=True)
class Fab(Attack):
    """FAB towards other classes, one after another; it has no random start.

    The extra term does not count: FAB has no objective but the distance to a decision.

    Args:
        steps: gradient steps per target.
        ranks: which classes, 1 being the likeliest; those that a model does not have are left out.
        order: likeliest by logits or by distance, as in :class:`~equipoise.attacks.TargetedApgd`.
    """

    name: ClassVar[str] = "fab"
    steps: int = 100
    ranks: tuple[int, ...] = RANKS
    order: str = "logits"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.one_of("order", self.order, ORDERS)

    def describe(self) -> dict[str, Any]:
        """Without the usual order, which runs of earlier versions do not name."""
        return {
            key: value
            for key, value in super().describe().items()
            if (key, value) != ("order", "logits")
        }

    def stages(self) -> tuple[Stage, ...]:
        """One per target, such as fab-1@30; a step also has a pass without gradients."""
        suffix = "" if self.steps == 100 else f"@{self.steps}"
        suffix += "" if self.order == "logits" else f"-{self.order}"
        return tuple(
            self.stage(
                f"fab-{rank}{suffix}",
                partial(self._search, rank),
                1.5 * self.steps,
                group=(self.name, self.steps),
            )
            for rank in self.ranks
        )

    def _search(
        self, rank: int, source: GradientSource, threat: Threat, stop_at_success: bool
    ) -> FabSearch | None:
        return (
            FabSearch(source, threat, self.steps, self.order, rank)
            if rank < source.classes
            else None
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class FabState(SearchState):
    """Rows of :class:`FabSearch`."""

    target: Tensor  # (B,) target classes
    point: Tensor  # (B, C, H, W)
    size: Tensor  # (B,) norm of the smallest adversarial perturbation, inf if there is none yet
    age: Tensor  # (B,) steps made


class FabSearch:
    """FAB towards the class of one rank."""

    def __init__(
        self, source: GradientSource, threat: Threat, steps: int, order: str, rank: int
    ) -> None:
        self.threat, self.passes = threat, steps
        self.choose_targets = partial(choose_targets, source, threat.norm, order, rank)
        self.value_and_gradient = source.value_and_gradient(
            "difference", logit_difference, with_extra=False
        )
        self.margins = source.margins()

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> FabState:
        """Every row at its clean image."""
        target = self.choose_targets(x, y, stream)
        unknown = x.new_full((len(x),), torch.inf)
        return FabState(
            x=x,
            y=y,
            index=stream.index,
            nearest=x,
            margin=unknown,
            logit_margin=unknown,
            target=target,
            point=x,
            size=unknown,
            age=torch.zeros_like(y),
        )

    def advance(
        self, state: FabState, stream: Stream, ages: Sequence[int], passes: int
    ) -> FabState:
        """`passes` steps; nothing is random."""
        for _ in range(passes):
            state = self._step(state)
        return state

    def _step(self, state: FabState) -> FabState:
        x, point, norm = state.x, state.point, self.threat.norm
        value, w, *_ = self.value_and_gradient(point, state.y, state.target)
        # The hyperplane {p : value + w·(p − point) = 0}, from the point and from the clean image.
        value_at_x = value + (w * (x - point)).sum(dim=(1, 2, 3))
        d1, d2 = geometry.move_to_hyperplane(
            torch.cat([point, x]), torch.cat([w, w]), torch.cat([value, value_at_x]), norm
        ).chunk(2)
        a1, a2 = (geometry.size(d, norm).clamp_min(1e-8) for d in (d1, d2))
        a = geometry.per_example((a1 / (a1 + a2)).clamp(max=MAX_BIAS), point)
        moved = ((1 - a) * (point + OVERSHOOT * d1) + a * (x + OVERSHOOT * d2)).clamp(0, 1)
        logit_margin, margin = self.margins(moved, state.y)
        fooled = (logit_margin <= 0) & (state.age < self.passes)
        size = geometry.size(moved - x, norm)
        smaller = fooled & (size < state.size)
        # Outside the ball a point proves nothing: its projection is judged once, at the end.
        in_ball = smaller & (size <= self.threat.eps * (1 + 1e-6))
        return replace(
            state,
            nearest=where_rows(smaller, geometry.project(moved, x, self.threat), state.nearest),
            size=torch.where(smaller, size, state.size),
            margin=torch.where(in_ball, margin, state.margin),
            logit_margin=torch.where(in_ball, logit_margin, state.logit_margin),
            point=where_rows(fooled, x + BACKWARD * (moved - x), moved),
            age=state.age + 1,
        )
