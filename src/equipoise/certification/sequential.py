"""As few samples as an image needs, with the guarantee of the full sampling.

Some first samples choose the class and foresee how many more are wanted. From that alone a schedule of
looks is fixed, and the failure probability is divided among them; then fresh samples are drawn from look
to look, and an exact bound is computed at each with its own share of the failure. All bounds hold together
with probability 1 − failure, whatever rule stops the sampling (`docs/guarantees.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.certification.bounds import Floats
from equipoise.certification.certificate import Certificate, made
from equipoise.certification.plan import SmoothingPlan
from equipoise.certification.radii import Rule
from equipoise.certification.sampler import Sampler

Ints = NDArray[np.int64]
# Chosen by simulating votes from an assumed spread of class probabilities (certified accuracy falling from 67 % at
# radius 0 to 4 % at 1.9, sigma 0.5); other spreads may want others. They set the cost, never the validity.
FIRST_SHARE = 0.7  # of the failure, for the look that should suffice
GROWTH = 1.4  # from look to look after it
MARGIN = 1.1  # on the foreseen number of samples
PILOT = 0.06  # of the foreseen number, spent on foreseeing it
NEARLY_ALL = 0.8  # of all samples: then take them at once, with the whole failure
LEAST = 50


class Goal(Protocol):
    """When is enough known?"""

    def wanted(self, shares: Floats, chosen: Ints) -> Ints:
        """(B,) samples that should suffice if the class probabilities are `shares` (B, K)."""

    def reached(self, votes: Floats, n: Floats, chosen: Ints, radius: Floats) -> NDArray[np.bool_]:
        """(B,) whether the radius that is certified by now will do."""


@dataclass(frozen=True)
class Tolerance:
    """The radius is within `tolerance` of what all samples would give at the present shares."""

    rule: Rule
    plan: SmoothingPlan
    tolerance: float

    def wanted(self, shares: Floats, chosen: Ints) -> Ints:
        """The least of a grid of sample sizes that loses at most the tolerance."""
        target = self._full(shares, chosen) - self.tolerance
        return _least(self.rule, self.plan, shares, chosen, lambda radius, n: radius >= target)

    def reached(self, votes: Floats, n: Floats, chosen: Ints, radius: Floats) -> NDArray[np.bool_]:
        """A class that cannot win has nothing to lose, so it ends here too."""
        return np.asarray(self._full(votes / n[:, None], chosen) - radius <= self.tolerance)

    def _full(self, shares: Floats, chosen: Ints) -> Floats:
        n = np.full(len(shares), float(self.plan.samples))
        return self.rule(shares * n[:, None], n, chosen, self.plan.failure)[1]


@dataclass(frozen=True)
class Decide:
    """It is decided whether the radius reaches `radius`: yes by the certificate, no by a bound from above."""

    rule: Rule
    plan: SmoothingPlan
    radius: float

    def wanted(self, shares: Floats, chosen: Ints) -> Ints:
        """The least of a grid of sample sizes that decides it either way."""
        def decides(radius: Floats, n: Floats) -> NDArray[np.bool_]:
            return (radius >= self.radius) | self._hopeless(shares * n[:, None], n, chosen)

        return _least(self.rule, self.plan, shares, chosen, decides)

    def reached(self, votes: Floats, n: Floats, chosen: Ints, radius: Floats) -> NDArray[np.bool_]:
        """Certified, or out of reach."""
        return (radius >= self.radius) | self._hopeless(votes, n, chosen)

    def _hopeless(self, votes: Floats, n: Floats, chosen: Ints) -> NDArray[np.bool_]:
        best = self.rule.optimistic(votes, n, chosen, self.plan.failure)
        return np.asarray(best < self.radius)


def goal_of(plan: SmoothingPlan, rule: Rule) -> Goal | None:
    """What the plan wants to know; None: all samples."""
    if plan.tolerance is not None:
        return Tolerance(rule, plan, plan.tolerance)
    return None if plan.decide_radius is None else Decide(rule, plan, plan.decide_radius)


def schedule(first: Ints, samples: int) -> tuple[Ints, Floats]:
    """(B, L) growing sample sizes of the looks and (B, L) shares of the failure, which sum to at most one.

    A row that needs fewer looks repeats its last size with a share of zero.
    """
    once = first >= NEARLY_ALL * samples
    first = np.where(once, samples, first)
    looks = np.where(once, 1, 1 + np.ceil(np.log(samples / first) / math.log(GROWTH))).astype(np.int64)
    number = np.arange(looks.max(initial=1))
    sizes = np.minimum(first[:, None] * GROWTH ** number[None], samples).astype(np.int64)
    sizes = np.where(number[None] >= looks[:, None] - 1, samples, sizes)
    rest = (1 - FIRST_SHARE) / np.maximum(looks - 1, 1)
    shares = np.where(number[None] == 0, np.where(once, 1.0, FIRST_SHARE)[:, None], rest[:, None])
    return sizes, np.where(number[None] < looks[:, None], shares, 0.0)


def certify(sampler: Sampler, plan: SmoothingPlan, rule: Rule, goal: Goal) -> Certificate:
    """Certificates by the looks of a schedule; each keeps the best radius of its looks."""
    pilot, chosen, spent = _foresee(sampler, plan, goal)
    shares = (pilot + _prior(pilot, chosen)) / (spent + 1)[:, None]
    first = np.clip(goal.wanted(shares, chosen) * MARGIN, min(LEAST, plan.samples), plan.samples).astype(np.int64)
    sizes, portions = schedule(first, plan.samples)
    count = len(first)
    votes, n, failure = np.zeros((count, sampler.classes)), np.zeros(count, np.int64), np.full(count, plan.failure)
    lower, radius, active = np.zeros(count), np.zeros(count), np.ones(count, dtype=bool)
    for look in range(sizes.shape[1]):
        active &= portions[:, look] > 0
        if not active.any():
            break
        stop = np.where(active, sizes[:, look], n)
        votes += sampler.votes("estimate", torch.from_numpy(n), torch.from_numpy(stop)).numpy()
        n = stop
        rows = active.nonzero()[0]
        failure[rows] = plan.failure * portions[rows, look]
        found, reach = rule(votes[rows], n[rows].astype(float), chosen[rows], failure[rows])
        lower[rows], radius[rows] = np.maximum(lower[rows], found), np.maximum(radius[rows], reach)
        active[rows] = ~goal.reached(votes[rows], n[rows].astype(float), chosen[rows], radius[rows])
    predicted, distance = made(torch.from_numpy(chosen), torch.from_numpy(radius))
    return Certificate(predicted, distance, torch.from_numpy(lower), torch.from_numpy(chosen),
                       torch.from_numpy(spent + n), torch.from_numpy(votes), torch.from_numpy(n),
                       torch.from_numpy(failure))


def _foresee(sampler: Sampler, plan: SmoothingPlan, goal: Goal) -> tuple[Floats, Ints, Ints]:
    """Votes of the first samples, the class they choose, and how many they were."""
    count = len(sampler.x)
    spent = np.full(count, plan.n0, dtype=np.int64)
    votes = sampler.votes("select", torch.zeros(count, dtype=torch.int64), torch.from_numpy(spent)).numpy()
    chosen = votes.argmax(axis=1)
    wanted = goal.wanted((votes + _prior(votes, chosen)) / (spent + 1)[:, None], chosen)
    more = np.maximum(spent, (PILOT * wanted).astype(np.int64))
    votes = votes + sampler.votes("select", torch.from_numpy(spent), torch.from_numpy(more)).numpy()
    return votes.astype(float), votes.argmax(axis=1), more


def _prior(votes: NDArray[np.int64] | Floats, chosen: Ints) -> Floats:
    """Half a vote for the chosen class and half for its best rival: nobody is foreseen at probability one."""
    prior = np.zeros(votes.shape)
    rows = np.arange(len(votes))
    prior[rows, chosen] = 0.5
    rivals = votes.astype(float)
    rivals[rows, chosen] = -1
    prior[rows, rivals.argmax(axis=1)] = 0.5
    return prior


class _Enough(Protocol):
    def __call__(self, radius: Floats, n: Floats) -> NDArray[np.bool_]: ...


def _least(rule: Rule, plan: SmoothingPlan, shares: Floats, chosen: Ints, enough: _Enough) -> Ints:
    """The first of a geometric grid of sample sizes at which the foreseen radius is enough; else all."""
    found = np.full(len(shares), plan.samples, dtype=np.int64)
    for size in reversed(np.rint(np.geomspace(min(LEAST, plan.samples), plan.samples, 40)).astype(np.int64)):
        n = np.full(len(shares), float(size))
        radius = rule(shares * n[:, None], n, chosen, plan.failure * FIRST_SHARE)[1]
        found = np.where(enough(radius, n), size, found)
    return found
