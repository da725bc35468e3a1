r"""Gradient ascent with momentum, as in [Dong2018], and with decaying steps.

.. math::
    v_{t+1} &= \tfrac34 v_t + \nabla \ell(x_t) / \mathrm{mean}|\nabla \ell(x_t)|, \\
    x_{t+1} &= \Pi\big(x_t + s_t \cdot \mathrm{steepest}(v_{t+1})\big), \quad
    s_t = \varepsilon \big(\tfrac12 (1 - t/T)^{3/2} + \tfrac1{200}\big)

Auto-PGD goes back to its best point and so stays on one side of a constraint; this one does not,
and so passes between two constraints that take turns, such as both sides of a mixture.

In ℓ1 a step changes ever fewer values, none of which is at the limit of [0, 1] that it moves
towards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.attacks.gradients import GradientSource, Objective
from equipoise.attacks.search_state import SearchState
from equipoise.core import geometry
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

MOMENTUM = 0.75
# Values that a step changes in ℓ1 per unit of eps, at first and at last.
L1_VALUES, LAST_L1_VALUES = 4.0, 0.3


@dataclass(frozen=True, eq=False, kw_only=True)
class MomentumState(SearchState):
    """Rows of :class:`MomentumSearch`."""

    point: Tensor  # (B, C, H, W)
    velocity: Tensor  # (B, C, H, W)
    target: Tensor  # (B,) target classes
    age: Tensor  # (B,) passes made


class MomentumSearch:
    """Ascent of an objective from random points; the arguments are those of
    :class:`~.apgd.ApgdSearch`."""

    def __init__(
        self,
        source: GradientSource,
        threat: Threat,
        steps: int,
        purpose: str,
        objective_name: str,
        objective: Objective,
        choose_targets: Callable[[Tensor, Tensor, Stream], Tensor],
    ) -> None:
        self.threat, self.purpose, self.choose_targets, self.passes = (
            threat,
            purpose,
            choose_targets,
            steps + 1,
        )
        self.value_and_gradient = source.value_and_gradient(objective_name, objective)

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> MomentumState:
        """Every row at a random point of the sphere, at rest."""
        unknown = x.new_full((len(x),), torch.inf)
        return MomentumState(
            x=x,
            y=y,
            index=stream.index,
            nearest=x,
            margin=unknown,
            logit_margin=unknown,
            point=geometry.surface(x, self.threat, stream.at(self.purpose)),
            velocity=torch.zeros_like(x),
            target=self.choose_targets(x, y, stream),
            age=torch.zeros_like(y),
        )

    def advance(
        self, state: MomentumState, stream: Stream, ages: Sequence[int], passes: int
    ) -> MomentumState:
        """`passes` steps; nothing is random after the start."""
        for _ in range(passes):
            state = self._step(state)
        return state

    def _step(self, state: MomentumState) -> MomentumState:
        point = state.point
        _, gradient, logit_margin, margin = self.value_and_gradient(point, state.y, state.target)
        state = state.with_nearer(point, logit_margin, margin, state.age < self.passes)
        scale = gradient.abs().mean(dim=(1, 2, 3)).clamp_min(torch.finfo(gradient.dtype).tiny)
        velocity = MOMENTUM * state.velocity + gradient / geometry.per_example(scale, gradient)
        left = (1 - state.age / (self.passes - 1)).clamp_min(0).to(point.dtype)
        size = self.threat.eps * (left**1.5 / 2 + 1 / 200)
        step = geometry.per_example(size, point) * self._direction(velocity, point, left)
        moved = geometry.project(point + step, state.x, self.threat)
        return replace(state, point=moved, velocity=velocity, age=state.age + 1)

    def _direction(self, velocity: Tensor, point: Tensor, left: Tensor) -> Tensor:
        """The steepest direction of size one; `left` (B,) is the share of the run that is still to
        come."""
        if self.threat.norm != "l1":
            return geometry.steepest(velocity, self.threat.norm)
        # Values at their limit would take the place of others, and the step would lead nowhere.
        free = torch.where(velocity > 0, point < 1, point > 0)
        count = self.threat.eps * (L1_VALUES * left + LAST_L1_VALUES)
        return geometry.steepest(velocity * free, "l1", count / point[0].numel())
