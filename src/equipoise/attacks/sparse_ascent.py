"""Auto-PGD in ℓ1 [Croce2021]: steps that change few pixels, in balls that shrink to the one of the
threat.

A step of size s changes the share of pixels with the largest gradients, each by the same amount,
and is projected onto the intersection of ball and [0, 1]; there is no momentum. At checkpoints the
share becomes 1/1.5 of the pixels that the best point changes. If these are fewer than 95 % of those
before, the image goes back to its best point with s = eps; otherwise s shrinks by 1.5, down to
eps/10.

The ascent runs in a ball of radius 3·eps, then from its best point in one of 2·eps, and from there
in the ball itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from equipoise.attacks.search_state import Rows
from equipoise.core import geometry
from equipoise.core.ascent import ValueAndGradient
from equipoise.core.geometry import per_example, where_rows
from equipoise.core.rng import Stream

SHRINK = 1.5  # of the step, and of the pixels that a step changes against those of the best point
FEWER = 0.95
MIN_STEP = 0.1  # of eps


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseAscentState(Rows):
    """Where B ascents are; the age counts the passes of the current phase."""

    point: Tensor  # (B, …)
    best: Tensor  # (B, …) the point with the highest value
    best_gradient: Tensor  # (B, …)
    best_value: Tensor  # (B,)
    changed: Tensor  # (B,) pixels that differ between the image and the best point at the last checkpoint
    share: Tensor  # (B,) of the pixels, which a step changes
    step: Tensor  # (B,) step size
    age: Tensor  # (B,)
    phase: Tensor  # (B,)

    def replace_where(self, mask: Tensor, other: SparseAscentState) -> SparseAscentState:
        """The rows of `other` where the mask (B,) is true."""
        return self._map(lambda mine, theirs: where_rows(mask, theirs, mine), other)


def start_sparse(start: Tensor, x: Tensor, radius: Tensor, phase: Tensor) -> SparseAscentState:
    """The state before the first pass of a phase, for start points (B, …) in balls of radii (B,)
    around x."""
    changed = _changed(start, x)
    return SparseAscentState(
        point=start,
        best=start,
        best_gradient=torch.zeros_like(start),
        best_value=torch.full_like(radius, -torch.inf),
        changed=changed,
        share=changed / (SHRINK * x[0].numel()),
        step=radius,
        age=torch.zeros_like(phase),
        phase=phase,
    )


def observe_sparse(state: SparseAscentState, value: Tensor, gradient: Tensor) -> SparseAscentState:
    """Take note of the value (B,) and gradient (B, …) at the current points."""
    better = (value > state.best_value) | (state.age == 0)
    return replace(
        state,
        best=where_rows(better, state.point, state.best),
        best_gradient=where_rows(better, gradient, state.best_gradient),
        best_value=torch.where(better, value, state.best_value),
    )


def take_sparse_step(
    state: SparseAscentState, gradient: Tensor, x: Tensor, radius: Tensor, interval: int | Tensor
) -> SparseAscentState:
    """Move every point, after :func:`observe_sparse`; every `interval` steps of a row there is a
    checkpoint."""
    due = (state.age > 0) & (state.age % interval == 0)
    changed = _changed(state.best, x)
    fewer = due & (changed < FEWER * state.changed)
    step = torch.where(fewer, radius, torch.maximum(state.step / SHRINK, MIN_STEP * radius))
    step = torch.where(due, step, state.step)
    share = torch.where(due, changed / (SHRINK * x[0].numel()), state.share)
    point = where_rows(fewer, state.best, state.point)
    direction = geometry.steepest(
        where_rows(fewer, state.best_gradient, gradient), "l1", _whole_pixels(share, x[0].numel())
    )
    return replace(
        state,
        point=geometry.project_to_ball(point + per_example(step, x) * direction, x, "l1", radius),
        step=step,
        share=share,
        changed=torch.where(due, changed, state.changed),
        age=state.age + 1,
    )


def _whole_pixels(share: Tensor, pixels: int) -> Tensor:
    """The share rounded up to whole pixels, as in AutoAttack: one pixel less reaches lower losses.

    Below two it is one pixel, or the steps of a small image could never end at a single one.
    """
    number = share * pixels
    number = torch.where(number < 2, 1.0, (number * (1 - 1e-6)).ceil())
    return (number + 0.5) / pixels  # rounded down by the step


def _changed(point: Tensor, x: Tensor) -> Tensor:
    return (point != x).flatten(1).sum(dim=1).to(x.dtype)


def maximize_sparse(
    value_and_gradient: ValueAndGradient, x: Tensor, start: Tensor, eps: Tensor, steps: int
) -> Tensor:
    """Maximise a function over balls of radii eps (B,) in one phase; see
    :func:`equipoise.attacks.apgd.apgd_maximize`.

    The start is any point; its projection counts.
    """
    phase = torch.zeros_like(eps, dtype=torch.int64)
    state = start_sparse(geometry.project_to_ball(start, x, "l1", eps), x, eps, phase)
    for _ in range(steps):
        value, gradient = value_and_gradient(state.point)
        state = take_sparse_step(
            observe_sparse(state, value, gradient), gradient, x, eps, checkpoint_interval(steps)
        )
    return observe_sparse(state, *value_and_gradient(state.point)).best


def checkpoint_interval(steps: int) -> int:
    """Steps between two checkpoints."""
    return max(int(0.04 * steps), 1)


def radius_phases(steps: int) -> list[tuple[int, int]]:
    """Radii as multiples of eps, each with its number of steps; a short ascent stays in the ball.

    >>> radius_phases(100), radius_phases(5)
    ([(3, 30), (2, 30), (1, 40)], [(1, 5)])
    """
    part = -(-3 * steps // 10)
    return [(3, part), (2, part), (1, steps - 2 * part)] if steps >= 10 else [(1, steps)]


class SparseAscent:
    """The ascent in phases, for a search: a pass at the start of every phase, and one after each of
    its steps."""

    def __init__(self, eps: float, steps: int, device: torch.device) -> None:
        phases = radius_phases(steps)
        self.eps = eps
        self.factors = torch.tensor(
            [factor for factor, _ in phases], dtype=torch.float64, device=device
        )
        self.steps = torch.tensor([count for _, count in phases], device=device)
        self.intervals = torch.tensor(
            [checkpoint_interval(count) for _, count in phases], device=device
        )
        self.ends = {
            age - 1 for age in accumulate(count + 1 for _, count in phases)
        }  # ages at last passes of phases
        self.passes = steps + len(phases)

    def start(self, x: Tensor, stream: Stream) -> SparseAscentState:
        """Random points of the spheres of the first phase."""
        phase = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        radius = self._radius(phase, x)
        noisy = x + stream.normal(*x.shape[1:]).to(x.dtype)
        return start_sparse(geometry.project_to_ball(noisy, x, "l1", radius), x, radius, phase)

    def counts(self, state: SparseAscentState) -> Tensor:
        """(B,) whether the current points are in the ball of the threat, and not behind the last
        pass."""
        return (self.factors[state.phase] == 1) & (state.age <= self.steps[state.phase])

    def advance(
        self,
        state: SparseAscentState,
        x: Tensor,
        value: Tensor,
        gradient: Tensor,
        ages: Sequence[int],
    ) -> SparseAscentState:
        """One step, given what a pass at the current points found; `ages` are the passes made
        before it, in all."""
        state = observe_sparse(state, value, gradient)
        moved = take_sparse_step(
            state, gradient, x, self._radius(state.phase, x), self.intervals[state.phase]
        )
        if self.ends.isdisjoint(ages):
            return moved
        over = (state.age == self.steps[state.phase]) & (state.phase < len(self.steps) - 1)
        phase = state.phase + over.long()
        radius = self._radius(phase, x)
        start = geometry.project_to_ball(state.best, x, "l1", radius)
        return moved.replace_where(over, start_sparse(start, x, radius, phase))

    def _radius(self, phase: Tensor, x: Tensor) -> Tensor:
        return (self.eps * self.factors[phase]).to(x.dtype)
