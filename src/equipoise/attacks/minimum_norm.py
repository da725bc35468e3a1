r"""The smallest perturbation that changes the prediction, per image: an upper bound on the robust
radius.

FAB towards the nearest classes gives a first bound r on the radius of an image. Then every run of
APGD searches the smaller ball of radius (1 − δ)·r, or that of the threat where nothing has broken
the image yet. After a success δ doubles, otherwise it is halved. Runs take turns: on the margin
from a random start, towards the class that wins at the smallest perturbation so far and starting
there, and towards each of the nearest classes.

A point counts only if the model itself, in full precision, misclassifies it. It is then pulled back
towards the clean image as far as the model still misclassifies it, by bisection on the segment
between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.attacks.apgd import apgd_maximize
from equipoise.attacks.engine import Stage
from equipoise.attacks.fab import FabSearch
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.search_state import SearchState
from equipoise.attacks.sparse_ascent import radius_phases
from equipoise.attacks.suite import Attack
from equipoise.attacks.targeted import MAX_RANKED, classes_by_distance
from equipoise.core import checks, geometry, losses
from equipoise.core.geometry import per_example, where_rows
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

# δ: the share by which a run tries to lower the radius
FIRST_SHRINK, MIN_SHRINK, MAX_SHRINK = 0.1, 0.002, 0.5
CLEAR = 1e-3  # a point counts with this share of the margin before it is pulled back: other batches round differently
BISECTIONS = 10  # of the segment between the image and a point


@dataclass(frozen=True)
class MinimumNorm(Attack):
    """The smallest perturbation within the ball of the threat that is misclassified; eps is the
    largest radius.

    Randomised models are refused: a radius needs points that are certainly misclassified.

    Args:
        steps: gradient steps per run of FAB and of APGD.
        targets: nearest classes by linearised distance, each with a run of FAB.
        restarts: runs of APGD.
    """

    name: ClassVar[str] = "minimum-norm"
    measures_radius: ClassVar[bool] = True
    steps: int = 30
    targets: int = 5
    restarts: int = 15

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.whole("targets", self.targets, least=1, most=MAX_RANKED)
        checks.whole("restarts", self.restarts, least=1, most=1000)
        for name in ("eot", "repeats"):
            value = getattr(self, name)
            checks.require(
                value is None,
                name,
                f"be left out for {self.name}, which does not attack randomised models",
                value,
            )

    def stages(self) -> tuple[Stage, ...]:
        """One: a stage leaves out images that are broken, and here the search goes on after
        that."""
        per_point = (BISECTIONS + 1) / 3
        cost = self.targets * (1.5 * self.steps + per_point) + self.restarts * (
            self.steps + 1 + per_point
        )
        return (self.stage(self.name, self._search, cost),)

    def _search(
        self, source: GradientSource, threat: Threat, stop_at_success: bool
    ) -> MinimumNormSearch:
        return MinimumNormSearch(self, source, threat)


@dataclass(frozen=True, eq=False, kw_only=True)
class MinimumNormState(SearchState):
    """Rows of :class:`MinimumNormSearch`; `nearest` is the smallest perturbed image, or else of the
    smallest margin."""

    targets: Tensor  # (B, R) nearest classes
    winner: Tensor  # (B,) class that wins at the smallest perturbation, or else the nearest
    size: Tensor  # (B,) norm of the smallest perturbation that is misclassified, inf if there is none, in double
    lowest: Tensor  # (B,) logit margin of `nearest`
    shrink: Tensor  # (B,) δ


class MinimumNormSearch:
    """A pass of this search is a whole run of FAB or APGD, and none ends it early: all rows have
    the same age."""

    def __init__(self, attack: MinimumNorm, source: GradientSource, threat: Threat) -> None:
        self.source, self.threat, self.steps = source, threat, attack.steps
        self.targets = min(attack.targets, source.classes - 1)
        self.passes = self.targets + attack.restarts
        loss = losses.LOSSES["relative-margin"]
        self.untargeted = source.value_and_gradient(
            "relative-margin", lambda z, y, target: loss(z, y)
        )
        self.targeted = source.value_and_gradient("targeted", losses.targeted_dlr)

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> MinimumNormState:
        """Nothing is known but the order of the classes."""
        targets = classes_by_distance(self.source, x, y, stream.index, self.threat.norm)[
            :, : self.targets
        ]
        unknown = x.new_full((len(x),), torch.inf)
        return MinimumNormState(
            x=x,
            y=y,
            index=stream.index,
            nearest=x,
            margin=unknown,
            logit_margin=unknown,
            targets=targets,
            winner=targets[:, 0],
            size=unknown.double(),
            lowest=unknown,
            shrink=torch.full_like(unknown, FIRST_SHRINK),
        )

    def advance(
        self, state: MinimumNormState, stream: Stream, ages: Sequence[int], passes: int
    ) -> MinimumNormState:
        """`passes` runs; margins stay unknown until the last, so that no row is finished before
        it."""
        assert len(set(ages)) == 1
        for run in range(ages[0], min(ages[0] + passes, self.passes)):
            if run < self.targets:
                state = self._keep(state, self._run_fab(state, stream, run + 1))
            else:
                before = state.size
                state = self._keep(state, self._run_apgd(state, stream, run - self.targets))
                factor = torch.where(state.size < before, 2.0, 0.5).to(state.shrink.dtype)
                state = replace(state, shrink=(state.shrink * factor).clamp(MIN_SHRINK, MAX_SHRINK))
        return state

    def _run_fab(self, state: MinimumNormState, stream: Stream, rank: int) -> Tensor:
        """The smallest perturbed images towards the classes of a rank."""
        search = FabSearch(self.source, self.threat, self.steps, "distance", rank)
        return search.advance(
            search.start(state.x, state.y, stream), stream, [0] * len(state.y), self.steps
        ).nearest

    def _run_apgd(self, state: MinimumNormState, stream: Stream, run: int) -> Tensor:
        """The images with the smallest margin inside balls that are smaller than the smallest
        perturbation so far."""
        x, norm, (turn, kind) = state.x, self.threat.norm, divmod(run, 3)
        known = state.size.isfinite()
        eps = torch.where(known, (1 - state.shrink) * state.size, self.threat.eps).to(x.dtype)
        # Adding to x rounds every pixel: balls are smaller by what that can add to the norm.
        rounding = (
            torch.finfo(x.dtype).eps * {"linf": 1.0, "l2": math.sqrt(x[0].numel()), "l1": 0.0}[norm]
        )
        eps = torch.maximum(eps - rounding, eps / 2)
        noise = stream.at(f"minimum-norm-{run}").uniform(*x.shape[1:], low=-1, high=1).to(x.dtype)
        start = x + noise * per_example(eps if norm == "linf" else torch.ones_like(eps), x)
        target = state.targets[:, (turn + 1) % self.targets] if kind == 2 else state.winner
        if kind == 1:
            start = where_rows(known, state.nearest, start)
        objective = self.untargeted if kind == 0 else self.targeted
        best, lowest = state.x, torch.full_like(state.lowest, torch.inf)

        def observe(point: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal best, lowest
            value, gradient, logit_margin, _ = objective(point, state.y, target)
            inside = geometry.size(point - x, norm) <= eps * (1 + 1e-5) + 2 * rounding
            better = inside & (logit_margin < lowest)
            best, lowest = (
                where_rows(better, point, best),
                torch.where(better, logit_margin, lowest),
            )
            return value, gradient

        for factor, steps in radius_phases(self.steps) if norm == "l1" else [(1, self.steps)]:
            start = geometry.project_to_ball(start, x, norm, factor * eps)
            start = apgd_maximize(observe, x, start, norm=norm, eps=factor * eps, steps=steps)
        return best

    def _keep(self, state: MinimumNormState, points: Tensor) -> MinimumNormState:
        """Pull points back towards the images, and keep those that are the smallest perturbations
        so far."""
        verdict = self.source.judge(points, state.y)
        broken = verdict.predicted != state.y
        rows = broken.nonzero().squeeze(1)  # the others need no further passes
        shortest, winner = points.clone(), verdict.predicted.clone()
        shortest[rows], winner[rows] = self._pull_back(
            state.x[rows],
            state.y[rows],
            points[rows],
            verdict.predicted[rows],
            verdict.logit_margin[rows],
        )
        size = geometry.size(shortest.double() - state.x.double(), self.threat.norm)
        smaller = broken & (size < state.size) & (size <= self.threat.eps)
        nearer = ~broken & state.size.isinf() & (verdict.logit_margin < state.lowest)
        return replace(
            state,
            nearest=where_rows(smaller | nearer, shortest, state.nearest),
            size=torch.where(smaller, size, state.size),
            winner=torch.where(smaller, winner, state.winner),
            lowest=torch.where(
                smaller | nearer, verdict.logit_margin.to(state.lowest.dtype), state.lowest
            ),
        )

    def _pull_back(
        self, x: Tensor, y: Tensor, points: Tensor, predicted: Tensor, logit_margin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The nearest misclassified points on the segments from images x to misclassified points,
        and their classes.

        `predicted` and `logit_margin` (R,) are those of the points.
        """
        shortest, winner = points, predicted
        low, high = x.new_zeros(len(x)), x.new_ones(len(x))
        for _ in range(BISECTIONS if len(x) else 0):
            middle = (low + high) / 2
            between = x + per_example(middle, x) * (points - x)
            there = self.source.judge(between, y)
            still = (there.predicted != y) & (there.logit_margin <= CLEAR * logit_margin)
            shortest, winner = (
                where_rows(still, between, shortest),
                torch.where(still, there.predicted, winner),
            )
            low, high = torch.where(still, low, middle), torch.where(still, middle, high)
        return shortest, winner


def radii_of(
    x_adv: Tensor, x: Tensor, broken: Sequence[bool] | Tensor, norm: str
) -> list[float | None]:
    """The norm of every perturbation that breaks an image, None for the others."""
    sizes = geometry.size(x_adv.double() - x.double(), norm).tolist()
    return [
        size if bool(is_broken) else None for size, is_broken in zip(sizes, broken, strict=True)
    ]
