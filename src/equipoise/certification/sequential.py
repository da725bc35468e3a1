"""Certificates that stop as soon as an image has enough samples, with the guarantee of the full
sampling.

The first samples select the class and predict how many more are needed. From them alone a schedule
of stages is fixed, and the failure probability is divided among the stages. Then fresh samples are
drawn stage by stage, and each stage computes an exact bound with its own share of the failure
probability. Votes that are all for one class were so at every earlier stage, so that one share pays
for their bounds at all stages. All bounds hold together with probability 1 − failure, whatever rule
stops the sampling (`docs/guarantees.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from equipoise.certification.certificate import Certificate, SmoothingPlan
from equipoise.certification.radii import Floats, Ints, ProbabilityBounds, VoteRule, runner_up
from equipoise.certification.sampler import Sampler

Bools = NDArray[np.bool_]
# These numbers affect the cost, never the validity.
# Of the sample size from stage to stage; the second if all first votes agree
GROWTH, UNANIMOUS_GROWTH = 1.4, 1.2
PILOT = 0.06  # of the predicted number, spent on predicting it
PILOT_ROUNDS = 4
# Of all samples: then a single stage takes them all, with the whole failure probability
NEARLY_ALL = 0.9
SMALLEST = 50  # samples of the first stage
# Tolerances that an image may lose before further stages are drawn; these cost less while the votes
# are unanimous.
MOST_LOST, MOST_LOST_UNANIMOUS = 2.0, 1.25
_STEPS = 8  # of the bisection for the number of samples


class Spending(NamedTuple):
    """Shares of the failure probability; later stages divide the rest."""

    first: Floats  # (B,) of the first stage
    unanimous: Floats  # (B,) of all later stages together, as long as all votes are for one class


class StoppingRule(Protocol):
    """Decides when the samples of an image suffice."""

    @property
    def margin(self) -> float:
        """The first stage takes so many times the samples that should suffice."""

    def spending(self, unanimous: Bools) -> Spending:
        """How the failure probability is divided, given whether all first votes (B,) agree."""

    def needed(self, shares: Floats, top: Ints, first_share: Floats) -> Ints:
        """(B,) samples that should suffice if the class probabilities are `shares` (B, K)."""

    def is_met(self, votes: Floats, n: Floats, top: Ints, bounds: ProbabilityBounds) -> Bools:
        """(B,) whether the bounds so far suffice."""


@dataclass(frozen=True)
class WithinTolerance:
    """Stop when the radius is expected to lose about `tolerance`, on average, against all samples.

    What they give is that of the usual certificate, without randomised bounds.
    """

    rule: VoteRule
    tolerance: float
    margin: float = 1.15

    def spending(self, unanimous: Bools) -> Spending:
        """Nearly all for the first stage, unless the number of samples that it needs is hard to
        predict."""
        return Spending(np.where(unanimous, 0.65, 0.95), np.where(unanimous, 0.3, 0.0))

    def needed(self, shares: Floats, top: Ints, first_share: Floats) -> Ints:
        """The smallest number that is expected to lose at most the tolerance."""
        n = np.full(len(shares), float(self.rule.plan.samples))
        target = self._full_radius(shares * n[:, None], n, top) - self.tolerance
        return _smallest_size(
            self.rule,
            shares,
            top,
            first_share,
            lambda bounds, n: self.rule.radius(bounds) >= target,
        )

    def is_met(self, votes: Floats, n: Floats, top: Ints, bounds: ProbabilityBounds) -> Bools:
        """Also met by a class that cannot win: it has no radius to lose."""
        left = (self.rule.plan.samples - n)[:, None]
        full = self._full_radius(votes + left * _smoothed_shares(votes, top), n + left[:, 0], top)
        most = np.where(_is_unanimous(votes, top), MOST_LOST_UNANIMOUS, MOST_LOST) * self.tolerance
        return np.asarray(full - self.rule.radius(bounds) <= most)

    def _full_radius(self, votes: Floats, n: Floats, top: Ints) -> Floats:
        return self.rule.radius(self.rule.bounds(votes, n, top, self.rule.plan.failure))


@dataclass(frozen=True)
class RadiusDecided:
    """Stop when the certificate reaches `radius`, or an upper bound shows that it will not."""

    rule: VoteRule
    radius: float
    margin: float = 1.1

    def spending(self, unanimous: Bools) -> Spending:
        """Images near the radius need several stages."""
        return Spending(np.full(len(unanimous), 0.7), np.zeros(len(unanimous)))

    def needed(self, shares: Floats, top: Ints, first_share: Floats) -> Ints:
        """The smallest number that decides it either way."""
        return _smallest_size(
            self.rule,
            shares,
            top,
            first_share,
            lambda bounds, n: self.is_met(shares * n[:, None], n, top, bounds),
        )

    def is_met(self, votes: Floats, n: Floats, top: Ints, bounds: ProbabilityBounds) -> Bools:
        """Certified, or out of reach."""
        out_of_reach = self.rule.largest_radius(votes, n, top, self.rule.plan.failure) < self.radius
        return np.asarray((self.rule.radius(bounds) >= self.radius) | out_of_reach)


@dataclass(frozen=True)
class AtEveryAlpha:
    """Stop when the rule of every alpha is met."""

    rules: Sequence[StoppingRule]

    @property
    def margin(self) -> float:
        """That of its rules."""
        return self.rules[0].margin

    def spending(self, unanimous: Bools) -> Spending:
        """That of its rules."""
        return self.rules[0].spending(unanimous)

    def needed(self, shares: Floats, top: Ints, first_share: Floats) -> Ints:
        """As many as the alpha that needs most."""
        return np.asarray(
            np.max([rule.needed(shares, top, first_share) for rule in self.rules], axis=0)
        )

    def is_met(self, votes: Floats, n: Floats, top: Ints, bounds: ProbabilityBounds) -> Bools:
        """Met at every alpha, from the same bounds."""
        return np.asarray(
            np.all([rule.is_met(votes, n, top, bounds) for rule in self.rules], axis=0)
        )


def stopping_rule(rule: VoteRule) -> StoppingRule | None:
    """The stopping rule of the rule's plan; None: draw all samples."""
    plan = rule.plan
    rules = [replace(rule, plan=own) for own in plan.per_alpha]
    if plan.tolerance is not None:
        return AtEveryAlpha([WithinTolerance(own, plan.tolerance) for own in rules])
    if plan.decide_radius is not None:
        return AtEveryAlpha([RadiusDecided(own, plan.decide_radius) for own in rules])
    return None


def schedule(
    first: Ints, samples: int, spending: Spending, growth: ArrayLike = GROWTH
) -> tuple[Ints, Floats]:
    """(B, L) growing sample sizes of the stages and (B, L) shares of the failure.

    With the share for unanimous votes they sum to at most one. A row that needs fewer stages
    repeats its last size with a share of zero.
    """
    single = first >= NEARLY_ALL * samples
    first, factor = np.where(single, samples, first), np.broadcast_to(growth, first.shape)
    stages = np.where(single, 1, 1 + np.ceil(np.log(samples / first) / np.log(factor))).astype(
        np.int64
    )
    number = np.arange(stages.max(initial=1))
    sizes = np.minimum(first[:, None] * factor[:, None] ** number[None], samples).astype(np.int64)
    sizes = np.where(number[None] >= stages[:, None] - 1, samples, sizes)
    rest = (1 - spending.first - spending.unanimous) / np.maximum(stages - 1, 1)
    shares = np.where(
        number[None] == 0, np.where(single, 1.0, spending.first)[:, None], rest[:, None]
    )
    return sizes, np.where(number[None] < stages[:, None], shares, 0.0)


def certify_in_stages(
    sampler: Sampler, rule: VoteRule, stopping: StoppingRule, smallest: int = SMALLEST
) -> Certificate:
    """Certificates by the stages of a schedule, the first of at least `smallest` samples; the best
    bounds count."""
    plan, uniform = rule.plan, sampler.uniforms()
    pilot, top, spent = _pilot(sampler, plan, stopping)
    agreed = _is_unanimous(pilot, top)
    spending = stopping.spending(agreed)
    needed = stopping.needed(_smoothed_shares(pilot, top), top, spending.first)
    first = np.clip(needed * stopping.margin, min(smallest, plan.samples), plan.samples).astype(
        np.int64
    )
    sizes, portions = schedule(
        first, plan.samples, spending, np.where(agreed, UNANIMOUS_GROWTH, GROWTH)
    )
    count = len(first)
    votes, n, failure = (
        np.zeros((count, sampler.num_classes)),
        np.zeros(count, np.int64),
        np.full(count, plan.failure),
    )
    certified, predicted = (ProbabilityBounds(np.zeros(count), np.ones(count)) for _ in range(2))
    active = np.ones(count, dtype=bool)
    for stage in range(sizes.shape[1]):
        active &= portions[:, stage] > 0
        if not active.any():
            break
        stop = np.where(active, sizes[:, stage], n)
        votes += sampler.votes("estimate", torch.from_numpy(n), torch.from_numpy(stop)).numpy()
        n, rows = stop, active.nonzero()[0]
        drawn = votes[rows], n[rows].astype(float), top[rows]
        share = portions[rows, stage]
        certified.tighten(rows, rule.bounds(*drawn, plan.failure * share, _at(uniform, rows)))
        if stage:
            share = np.where(_is_unanimous(votes, top), spending.unanimous, 0.0)[rows].clip(share)
        failure[rows] = plan.failure * share
        predicted.tighten(rows, rule.predicted_bounds(*drawn, failure[rows]))
        # With a share for unanimous votes, whether to stop must not depend on the random numbers
        # behind the bounds.
        judged = (
            np.where(spending.unanimous > 0, *pair)
            for pair in zip(predicted, certified, strict=True)
        )
        active[rows] = ~stopping.is_met(*drawn, ProbabilityBounds(*judged).at(rows))
    rows = ((n > sizes[:, 0]) & _is_unanimous(votes, top) & (spending.unanimous > 0)).nonzero()[0]
    certified.tighten(
        rows,
        rule.bounds(
            votes[rows],
            n[rows].astype(float),
            top[rows],
            plan.failure * spending.unanimous[rows],
            _at(uniform, rows),
        ),
    )
    return Certificate.of(
        top=torch.from_numpy(top),
        radius=torch.from_numpy(rule.radius(certified)),
        lower=torch.from_numpy(certified.lower),
        upper=torch.from_numpy(certified.upper),
        votes=torch.from_numpy(votes),
        n=torch.from_numpy(n),
        failure=torch.from_numpy(failure),
        selection_samples=torch.from_numpy(spent),
    )


def _at(uniform: Floats | None, rows: Ints) -> Floats | None:
    return None if uniform is None else uniform[rows]


def _pilot(
    sampler: Sampler, plan: SmoothingPlan, stopping: StoppingRule
) -> tuple[Floats, Ints, Ints]:
    """Votes of the first samples, the class they select, and their number."""
    count = len(sampler.x)
    drawn, more = np.zeros(count, dtype=np.int64), np.full(count, plan.n0, dtype=np.int64)
    votes = np.zeros((count, sampler.num_classes))
    for _ in range(PILOT_ROUNDS):
        votes = (
            votes + sampler.votes("select", torch.from_numpy(drawn), torch.from_numpy(more)).numpy()
        )
        drawn, top = more, votes.argmax(axis=1)
        first_share = stopping.spending(_is_unanimous(votes, top)).first
        needed = stopping.needed(_smoothed_shares(votes, top), top, first_share)
        more = np.maximum(drawn, (PILOT * needed).astype(np.int64))
        if plan.tolerance is not None:
            # Where one stage takes all samples, there is no number to predict. (A few votes near a
            # radius that is to be decided ask for all samples too often.)
            more = np.where(needed * stopping.margin >= NEARLY_ALL * plan.samples, drawn, more)
    return votes, top, drawn


def _is_unanimous(votes: Floats, top: Ints) -> Bools:
    """(B,) whether all votes are for the top class."""
    return np.asarray(votes[np.arange(len(votes)), top] == votes.sum(axis=1))


def _smoothed_shares(votes: Floats, top: Ints) -> Floats:
    """(B, K) shares with half a vote more for the top class and the runner-up, so that no class has
    probability 1."""
    rows, votes = np.arange(len(votes)), votes.copy()
    second = runner_up(votes, top)
    votes[rows, top] += 0.5
    votes[rows, second] += 0.5
    return np.asarray(votes / votes.sum(axis=1, keepdims=True))


def _smallest_size(
    rule: VoteRule,
    shares: Floats,
    top: Ints,
    first_share: Floats,
    is_enough: Callable[[ProbabilityBounds, Floats], Bools],
) -> Ints:
    """The first of a geometric grid of sample sizes at which the predicted bounds (and n) are
    enough; else all.

    By bisection, because more samples are enough wherever fewer are.
    """
    plan = rule.plan
    sizes = np.rint(np.geomspace(min(SMALLEST, plan.samples), plan.samples, 1 << _STEPS)).astype(
        np.int64
    )
    low, high = np.zeros(len(shares), dtype=np.int64), np.full(len(shares), len(sizes) - 1)
    for _ in range(_STEPS):
        middle = (low + high) // 2
        n = sizes[middle].astype(float)
        bounds = rule.predicted_bounds(shares * n[:, None], n, top, plan.failure * first_share)
        enough = is_enough(bounds, n)
        low, high = (
            np.where(enough, low, np.minimum(middle + 1, high)),
            np.where(enough, middle, high),
        )
    return np.asarray(sizes[high])
