r"""Auto-PGD [Croce2020]: projected gradient ascent with momentum that halves its own steps.

Steps start at 2·eps and halve where progress stalls:

.. math::
    z &= \Pi\big(x_t + s \cdot \mathrm{steepest}(\nabla \ell(x_t))\big), \\
    x_{t+1} &= \Pi\big(x_t + \tfrac34 (z - x_t) + \tfrac14 (x_t - x_{t-1})\big)

At checkpoints (first after 22 % of the steps, then at intervals that shrink by 3 % to 6 %) an image
halves its step and goes back to its best point if fewer than ¾ of the steps since the last
checkpoint raised the loss, or if neither the step nor the best loss has changed since.

:func:`observe` and :func:`take_step` are the algorithm; :class:`ApgdSearch` runs it in attacks,
:func:`apgd_maximize` in training, where every image has a radius of its own. In ℓ1
:mod:`equipoise.attacks.sparse_ascent` takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource, Objective
from equipoise.attacks.search_state import Rows, SearchState
from equipoise.attacks.sparse_ascent import SparseAscent, SparseAscentState, maximize_sparse
from equipoise.attacks.suite import Attack
from equipoise.core import checks, geometry, losses
from equipoise.core.ascent import ValueAndGradient
from equipoise.core.geometry import where_rows
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

MOMENTUM = 0.75  # share of the gradient step; the rest repeats the last move
RHO = 0.75  # steps halve unless more than this share of the last ones raised the loss


@dataclass(frozen=True, eq=False, kw_only=True)
class AscentState(Rows):
    """Where B ascents are; each has its own age and step size."""

    point: Tensor  # (B, …)
    previous: Tensor  # (B, …) the point before
    best: Tensor  # (B, …) the point with the highest value
    best_gradient: Tensor  # (B, …)
    best_value: Tensor  # (B,)
    last_value: Tensor  # (B,)
    checkpoint_value: Tensor  # (B,) best value at the last checkpoint
    rises: Tensor  # (B,) steps that raised the value since the last checkpoint
    halved: Tensor  # (B,) whether the step was halved at the last checkpoint
    step: Tensor  # (B,) step size
    age: Tensor  # (B,) passes made


def start_ascent(start: Tensor, eps: Tensor) -> AscentState:
    """The state before the first pass, for start points (B, …) in balls of radii eps (B,)."""
    lowest = eps.new_full(eps.shape, -torch.inf)
    return AscentState(
        point=start,
        previous=start,
        best=start,
        best_gradient=torch.zeros_like(start),
        best_value=lowest,
        last_value=lowest,
        checkpoint_value=lowest,
        rises=torch.zeros_like(eps),
        halved=torch.ones_like(eps, dtype=torch.bool),
        step=2 * eps,
        age=torch.zeros_like(eps, dtype=torch.int64),
    )


def observe(state: AscentState, value: Tensor, gradient: Tensor) -> AscentState:
    """Take note of the value (B,) and gradient (B, …) at the current points."""
    first = state.age == 0
    better = (value > state.best_value) | first
    return replace(
        state,
        rises=state.rises + ((value > state.last_value) & ~first),
        last_value=value,
        best=where_rows(better, state.point, state.best),
        best_gradient=where_rows(better, gradient, state.best_gradient),
        best_value=torch.where(better, value, state.best_value),
        checkpoint_value=torch.where(first, value, state.checkpoint_value),
    )


def take_step(
    state: AscentState,
    gradient: Tensor,
    *,
    norm: str,
    project: Callable[[Tensor], Tensor],
    intervals: Tensor | None,
) -> AscentState:
    """Move every point, after :func:`observe`; `project` brings points (B, …) back into the balls.

    `intervals` are the :func:`checkpoint_intervals` by age, as a tensor; None if no row is at a
    checkpoint.
    """
    first = state.age == 0
    if intervals is not None:
        state, gradient = _halve_stalled(state, gradient, intervals)
    point = state.point
    step = geometry.per_example(state.step, point) * geometry.steepest(gradient, norm)
    share = geometry.per_example(torch.where(first, 1.0, MOMENTUM).to(point.dtype), point)
    target = project(point + step)
    mixed = point + share * (target - point) + (1 - share) * (point - state.previous)
    return replace(state, previous=point, point=project(mixed), age=state.age + 1)


def _halve_stalled(
    state: AscentState, gradient: Tensor, intervals: Tensor
) -> tuple[AscentState, Tensor]:
    """Rows at a checkpoint without progress halve their step and go back to their best point."""
    interval = intervals[state.age.clamp(max=len(intervals) - 1)]
    due = interval > 0
    halve = due & (
        (state.rises <= RHO * interval)
        | (~state.halved & (state.checkpoint_value >= state.best_value))
    )
    state = replace(
        state,
        step=torch.where(halve, state.step / 2, state.step),
        halved=torch.where(due, halve, state.halved),
        checkpoint_value=torch.where(due, state.best_value, state.checkpoint_value),
        rises=torch.where(due, torch.zeros_like(state.rises), state.rises),
        point=where_rows(halve, state.best, state.point),
    )
    return state, where_rows(halve, state.best_gradient, gradient)


def checkpoint_intervals(steps: int) -> list[int]:
    """By age: the steps since the previous checkpoint if there is one at that age, else 0.

    >>> [(age, interval) for age, interval in enumerate(checkpoint_intervals(100)) if interval][:4]
    [(22, 22), (41, 19), (57, 16), (70, 13)]
    """
    interval, least, shrink = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    intervals, age = [0] * (steps + 2), interval
    while age <= steps:
        intervals[age] = interval
        interval = max(interval - shrink, least)
        age += interval
    return intervals


def apgd_maximize(
    value_and_gradient: ValueAndGradient,
    x: Tensor,
    start: Tensor,
    *,
    norm: str,
    eps: Tensor,
    steps: int,
) -> Tensor:
    """Maximise a function over balls of radii eps (B,) around x (B, …); nothing in it makes a GPU
    wait.

    The caller sets the mode of the model. Returns the iterates (B, …) with the highest values,
    detached.
    """
    if norm == "l1":
        return maximize_sparse(value_and_gradient, x, start.detach(), eps, steps)
    state, intervals = start_ascent(start.detach(), eps), checkpoint_intervals(steps)
    by_age = torch.tensor(intervals, device=eps.device)
    for age in range(steps + 1):
        value, gradient = value_and_gradient(state.point)
        state = observe(state, value, gradient)
        if age < steps:
            state = take_step(
                state,
                gradient,
                norm=norm,
                intervals=by_age if intervals[age] else None,
                project=lambda point: geometry.project_to_ball(point, x, norm, eps),
            )
    return state.best


@dataclass(frozen=True)
class Apgd(Attack):
    """APGD from random starts.

    Args:
        loss: ce, dlr, margin (of probabilities), or relative-ce and relative-margin, which have no
            scale.
        steps: gradient steps per start.
        restarts: starts per image; images already broken are left out of later ones.
    """

    name: ClassVar[str] = "apgd"
    loss: str = "ce"
    steps: int = 100
    restarts: int = 1

    def __post_init__(self) -> None:
        checks.one_of("loss", self.loss, losses.LOSSES)
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.whole("restarts", self.restarts, least=1, most=1000)

    def stages(self) -> tuple[Stage, ...]:
        """One per start, such as apgd-ce and apgd-ce-2@20."""
        suffix = "" if self.steps == 100 else f"@{self.steps}"
        names = [
            f"apgd-{self.loss}{f'-{restart + 1}' if restart else ''}{suffix}"
            for restart in range(self.restarts)
        ]
        return tuple(
            self.stage(
                name,
                partial(self._search, name),
                self.steps,
                group=(self.name, self.loss, self.steps),
            )
            for name in names
        )

    def _search(
        self, purpose: str, source: GradientSource, threat: Threat, stop_at_success: bool
    ) -> ApgdSearch:
        loss = losses.LOSSES[self.loss]
        return ApgdSearch(
            source, threat, self.steps, purpose, self.loss, lambda z, y, target: loss(z, y)
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ApgdState(SearchState):
    """Rows of :class:`ApgdSearch`."""

    ascent: AscentState | SparseAscentState
    target: Tensor  # (B,) target classes; of an objective without targets the labels
    low: Tensor | None  # (B, C, H, W) bounds of an ℓ∞ ball
    high: Tensor | None


class ApgdSearch:
    """APGD on an objective; the first pass is at the start, pass t + 1 at the point after t steps.

    `purpose` is that of the random start; `choose_targets` maps images, labels and random stream to
    classes (B,).
    """

    def __init__(
        self,
        source: GradientSource,
        threat: Threat,
        steps: int,
        purpose: str,
        objective_name: str,
        objective: Objective,
        choose_targets: Callable[[Tensor, Tensor, Stream], Tensor] | None = None,
    ) -> None:
        self.threat, self.purpose, self.choose_targets = threat, purpose, choose_targets
        self.sparse = (
            SparseAscent(threat.eps, steps, source.example.device) if threat.norm == "l1" else None
        )
        self.passes = steps + 1 if self.sparse is None else self.sparse.passes
        self.intervals = checkpoint_intervals(steps)
        self.intervals_by_age = torch.tensor(self.intervals, device=source.example.device)
        self.value_and_gradient = source.value_and_gradient(objective_name, objective)

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> ApgdState:
        """Every row at a random point of the sphere."""
        eps = x.new_full((len(x),), self.threat.eps)
        own = stream.at(self.purpose)
        ascent = (
            start_ascent(geometry.surface(x, self.threat, own), eps)
            if self.sparse is None
            else self.sparse.start(x, own)
        )
        low, high = geometry.reusable_bounds(x, self.threat)
        target = y if self.choose_targets is None else self.choose_targets(x, y, stream)
        unknown = torch.full_like(eps, torch.inf)
        return ApgdState(
            x=x,
            y=y,
            index=stream.index,
            nearest=x,
            margin=unknown,
            logit_margin=unknown,
            ascent=ascent,
            target=target,
            low=low,
            high=high,
        )

    def advance(
        self, state: ApgdState, stream: Stream, ages: Sequence[int], passes: int
    ) -> ApgdState:
        """`passes` steps; nothing is random after the start."""
        distinct_ages = set(ages)
        for done in range(passes):
            state = self._step(state, [age + done for age in distinct_ages])
        return state

    def _step(self, state: ApgdState, ages: Sequence[int]) -> ApgdState:
        """One step, given the ages that occur among the rows."""
        point = state.ascent.point
        value, gradient, logit_margin, margin = self.value_and_gradient(
            point, state.y, state.target
        )
        counts, ascent = self._move(state, value, gradient, ages)
        return replace(state.with_nearer(point, logit_margin, margin, counts), ascent=ascent)

    def _move(
        self, state: ApgdState, value: Tensor, gradient: Tensor, ages: Sequence[int]
    ) -> tuple[Tensor, AscentState | SparseAscentState]:
        """(B,) whether the points before the step count, unlike those of finished rows, and the
        ascent after it."""
        ascent = state.ascent
        if isinstance(ascent, SparseAscentState):
            assert self.sparse is not None
            return self.sparse.counts(ascent), self.sparse.advance(
                ascent, state.x, value, gradient, ages
            )
        at_checkpoint = any(self.intervals[min(age, len(self.intervals) - 1)] for age in ages)
        project = partial(
            geometry.project, x=state.x, threat=self.threat, low=state.low, high=state.high
        )
        return ascent.age < self.passes, take_step(
            observe(ascent, value, gradient),
            gradient,
            norm=self.threat.norm,
            project=project,
            intervals=self.intervals_by_age if at_checkpoint else None,
        )
