"""Certificates that stop as soon as an image has enough samples, with the guarantee of the full sampling.

The first samples select the class and predict how many more are needed. From them alone a schedule of stages is fixed,
and the failure probability is divided among the stages. Then fresh samples are drawn stage by stage, and each stage
computes an exact bound with its own share of the failure probability. All bounds hold together with probability
1 − failure, whatever rule stops the sampling (`docs/guarantees.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.certification.certificate import Certificate, SmoothingPlan
from equipoise.certification.radii import Floats, Ints, VoteRule, runner_up
from equipoise.certification.sampler import Sampler

Bools = NDArray[np.bool_]
# Tuned by simulating votes from an assumed distribution of class probabilities (certified accuracy falling from 67 % at
# radius 0 to 4 % at 1.9, sigma 0.5). They affect the cost, never the validity.
FIRST_SHARE = 0.7  # of the failure probability, for the stage that should suffice
GROWTH = 1.4  # of the sample size from stage to stage after it
MARGIN = 1.1  # on the predicted number of samples
PILOT = 0.06  # of the predicted number, spent on predicting it
NEARLY_ALL = 0.8  # of all samples: then a single stage takes them all, with the whole failure probability
SMALLEST = 50  # samples of the first stage


class StoppingRule(Protocol):
    """Decides when the samples of an image suffice."""

    def needed(self, shares: Floats, top: Ints) -> Ints:
        """(B,) samples that should suffice if the class probabilities are `shares` (B, K)."""

    def is_met(self, votes: Floats, n: Floats, top: Ints, radius: Floats) -> Bools:
        """(B,) whether the radius certified so far suffices."""


@dataclass(frozen=True)
class WithinTolerance:
    """Stop when the radius is within `tolerance` of what all samples would give at the present shares."""

    rule: VoteRule
    tolerance: float

    def needed(self, shares: Floats, top: Ints) -> Ints:
        """The smallest of a grid of sample sizes that loses at most the tolerance."""
        target = self._full_radius(shares, top) - self.tolerance
        return _smallest_size(self.rule, shares, top, lambda radius, n: radius >= target)

    def is_met(self, votes: Floats, n: Floats, top: Ints, radius: Floats) -> Bools:
        """Also met by a class that cannot win: it has no radius to lose."""
        return np.asarray(self._full_radius(votes / n[:, None], top) - radius <= self.tolerance)

    def _full_radius(self, shares: Floats, top: Ints) -> Floats:
        n = np.full(len(shares), float(self.rule.plan.samples))
        return self.rule(shares * n[:, None], n, top, self.rule.plan.failure)[1]


@dataclass(frozen=True)
class RadiusDecided:
    """Stop when the certificate reaches `radius`, or an upper bound shows that it will not."""

    rule: VoteRule
    radius: float

    def needed(self, shares: Floats, top: Ints) -> Ints:
        """The smallest of a grid of sample sizes that decides it either way."""
        return _smallest_size(self.rule, shares, top,
                              lambda radius, n: self.is_met(shares * n[:, None], n, top, radius))

    def is_met(self, votes: Floats, n: Floats, top: Ints, radius: Floats) -> Bools:
        """Certified, or out of reach."""
        out_of_reach = self.rule.largest_radius(votes, n, top, self.rule.plan.failure) < self.radius
        return np.asarray((radius >= self.radius) | out_of_reach)


def stopping_rule(rule: VoteRule) -> StoppingRule | None:
    """The stopping rule of the rule's plan; None: draw all samples."""
    if rule.plan.tolerance is not None:
        return WithinTolerance(rule, rule.plan.tolerance)
    return None if rule.plan.decide_radius is None else RadiusDecided(rule, rule.plan.decide_radius)


def schedule(first: Ints, samples: int) -> tuple[Ints, Floats]:
    """(B, L) growing sample sizes of the stages and (B, L) shares of the failure, which sum to at most one.

    A row that needs fewer stages repeats its last size with a share of zero.
    """
    single = first >= NEARLY_ALL * samples
    first = np.where(single, samples, first)
    stages = np.where(single, 1, 1 + np.ceil(np.log(samples / first) / math.log(GROWTH))).astype(np.int64)
    number = np.arange(stages.max(initial=1))
    sizes = np.minimum(first[:, None] * GROWTH ** number[None], samples).astype(np.int64)
    sizes = np.where(number[None] >= stages[:, None] - 1, samples, sizes)
    rest = (1 - FIRST_SHARE) / np.maximum(stages - 1, 1)
    shares = np.where(number[None] == 0, np.where(single, 1.0, FIRST_SHARE)[:, None], rest[:, None])
    return sizes, np.where(number[None] < stages[:, None], shares, 0.0)


def certify_in_stages(sampler: Sampler, rule: VoteRule, stopping: StoppingRule,
                      smallest: int = SMALLEST) -> Certificate:
    """Certificates by the stages of a schedule, the first of at least `smallest` samples; the best radius counts."""
    plan = rule.plan
    pilot, top, spent = _pilot(sampler, plan, stopping)
    needed = stopping.needed(_smoothed_shares(pilot, top), top)
    first = np.clip(needed * MARGIN, min(smallest, plan.samples), plan.samples).astype(np.int64)
    sizes, portions = schedule(first, plan.samples)
    count = len(first)
    votes, n, failure = np.zeros((count, sampler.num_classes)), np.zeros(count, np.int64), np.full(count, plan.failure)
    lower, radius, active = np.zeros(count), np.zeros(count), np.ones(count, dtype=bool)
    for stage in range(sizes.shape[1]):
        active &= portions[:, stage] > 0
        if not active.any():
            break
        stop = np.where(active, sizes[:, stage], n)
        votes += sampler.votes("estimate", torch.from_numpy(n), torch.from_numpy(stop)).numpy()
        n = stop
        rows = active.nonzero()[0]
        failure[rows] = plan.failure * portions[rows, stage]
        bound, reach = rule(votes[rows], n[rows].astype(float), top[rows], failure[rows])
        lower[rows], radius[rows] = np.maximum(lower[rows], bound), np.maximum(radius[rows], reach)
        active[rows] = ~stopping.is_met(votes[rows], n[rows].astype(float), top[rows], radius[rows])
    return Certificate.of(top=torch.from_numpy(top), radius=torch.from_numpy(radius), lower=torch.from_numpy(lower),
                          votes=torch.from_numpy(votes), n=torch.from_numpy(n), failure=torch.from_numpy(failure),
                          selection_samples=torch.from_numpy(spent))


def _pilot(sampler: Sampler, plan: SmoothingPlan, stopping: StoppingRule) -> tuple[Floats, Ints, Ints]:
    """Votes of the first samples, the class they select, and their number."""
    count = len(sampler.x)
    spent = np.full(count, plan.n0, dtype=np.int64)
    votes = sampler.votes("select", torch.zeros(count, dtype=torch.int64), torch.from_numpy(spent)).double().numpy()
    top = votes.argmax(axis=1)
    needed = stopping.needed(_smoothed_shares(votes, top), top)
    more = np.maximum(spent, (PILOT * needed).astype(np.int64))
    votes = votes + sampler.votes("select", torch.from_numpy(spent), torch.from_numpy(more)).numpy()
    return votes, votes.argmax(axis=1), more


def _smoothed_shares(votes: Floats, top: Ints) -> Floats:
    """(B, K) shares with half a vote more for the top class and the runner-up, so that no class has probability 1."""
    rows, votes = np.arange(len(votes)), votes.copy()
    second = runner_up(votes, top)
    votes[rows, top] += 0.5
    votes[rows, second] += 0.5
    return np.asarray(votes / votes.sum(axis=1, keepdims=True))


def _smallest_size(rule: VoteRule, shares: Floats, top: Ints, is_enough: Callable[[Floats, Floats], Bools]) -> Ints:
    """The first of a geometric grid of sample sizes at which the predicted radius (and n) is enough; else all."""
    plan = rule.plan
    sizes = np.full(len(shares), plan.samples, dtype=np.int64)
    for size in reversed(np.rint(np.geomspace(min(SMALLEST, plan.samples), plan.samples, 40)).astype(np.int64)):
        n = np.full(len(shares), float(size))
        radius = rule(shares * n[:, None], n, top, plan.failure * FIRST_SHARE)[1]
        sizes = np.where(is_enough(radius, n), size, sizes)
    return sizes
