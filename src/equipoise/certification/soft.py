"""Smoothing probabilities instead of votes, with a bound for means of numbers in [0, 1].

The bound is a bet [WaudbySmith2024]: for every candidate m, wager on "the mean is above m" with stakes
that look only at earlier samples. If the mean is at most m the capital is a supermartingale, so it ever
reaches 1 / failure with probability at most `failure` (Ville): then m is struck out. It holds at any
stopping time, so stopping early costs nothing.
"""

from __future__ import annotations

import math

import torch
from scipy.special import ndtri
from torch import Tensor

from equipoise.certification import radii
from equipoise.certification.certificate import Certificate, made
from equipoise.certification.plan import SmoothingPlan
from equipoise.certification.sampler import Sampler

CANDIDATES = 512
GROWTH = 1.3  # from round to round; stakes are renewed at each
_STAKE = 0.95  # of the most that cannot lose everything
_PRIOR = 0.05  # pseudo-deviation in the estimated variance


class Bets:
    """The capital of every candidate mean for B images."""

    def __init__(self, count: int, plan: SmoothingPlan, device: torch.device) -> None:
        highest = float(ndtri(plan.failure ** (1 / plan.samples)))
        # Even steps of the quantile are even steps of the radius; radii need no mean below one half.
        z = torch.linspace(0, highest, CANDIDATES, dtype=torch.float64, device=device)
        self.candidates = torch.special.ndtr(z).clamp_(max=1 - 1e-12)
        self.threshold = -math.log(plan.failure)
        self.capital = torch.zeros(count, CANDIDATES, dtype=torch.float64, device=device)
        self.struck = torch.zeros(count, CANDIDATES, dtype=torch.bool, device=device)
        self.stakes = torch.zeros_like(self.capital)

    def stake(self, n: Tensor, total: Tensor, squares: Tensor) -> None:
        """Near-optimal stakes (μ − m) / (v + (μ − m)²) from the mean and variance seen so far."""
        mean = total / n
        variance = ((squares - n * mean**2).clamp_min(0) + _PRIOR) / (n + 1)
        edge = (mean.unsqueeze(1) - self.candidates).clamp_min(0)
        best = edge / (variance.unsqueeze(1) + edge**2)
        self.stakes = torch.minimum(best, _STAKE / self.candidates)

    def wager(self, position: Tensor, value: Tensor, live: Tensor) -> None:
        """Bet on R samples at the stakes of their images."""
        growth = torch.log1p(self.stakes[position] * (value.unsqueeze(1) - self.candidates))
        self.capital.index_add_(0, position, growth * live.unsqueeze(1))

    def settle(self) -> Tensor:
        """(B,) the lower bound by now: below it every candidate has been struck out; 0 if none was."""
        self.struck |= self.capital >= self.threshold
        run = self.struck.to(torch.int64).cumprod(dim=1).sum(dim=1)
        return torch.where(run > 0, self.candidates[(run - 1).clamp_min(0)], 0.0)


def certify(sampler: Sampler, plan: SmoothingPlan) -> Certificate:
    """Certificates for the mean probabilities; rounds grow geometrically and may end early."""
    device, count = sampler.x.device, len(sampler.x)
    chosen, n0 = _choose(sampler, plan)
    moments = _Moments(count, sampler.classes, device)
    bets = Bets(count, plan, device)
    done, n = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    lower, size = torch.zeros(count, dtype=torch.float64), plan.n0
    while not bool(done.all()):
        seen = n0 + moments if moments.n.any() else n0
        own = chosen.unsqueeze(1)
        bets.stake(seen.n, seen.total.gather(1, own).squeeze(1), seen.squares.gather(1, own).squeeze(1))
        stop = torch.where(done, n, min(size, plan.samples))

        def use(position: Tensor, logits: Tensor, live: Tensor) -> None:
            p = moments.add(position, logits, live)
            bets.wager(position, p.gather(1, chosen[position].unsqueeze(1)).squeeze(1), live)

        sampler.visit("estimate", n, stop, use)
        n = stop
        lower = bets.settle().cpu() - sampler.slack
        done |= n >= plan.samples
        if plan.tolerance is not None or plan.decide_radius is not None:
            done |= _enough(plan, lower, moments, chosen, n)
        size = math.ceil(size * GROWTH)
    lower = lower.clamp_min(0)
    reach = torch.from_numpy(radii.one_sided(lower.numpy(), plan.sigma, plan.alpha))
    predicted, radius = made(chosen.cpu(), reach)
    return Certificate(predicted, radius, lower, chosen.cpu(), n + plan.n0, moments.total.cpu(), n,
                       torch.full((count,), plan.failure, dtype=torch.float64))


class _Moments:
    """Number, sum and sum of squares of every class's probability, per image."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self.n = torch.zeros(count, dtype=torch.float64, device=device)
        self.total = torch.zeros(count, classes, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.total)

    def add(self, position: Tensor, logits: Tensor, live: Tensor) -> Tensor:
        p = torch.softmax(logits.double(), dim=1).clamp_(0, 1)
        weight = live.to(p.dtype)
        self.n.index_add_(0, position, weight)
        self.total.index_add_(0, position, p * weight.unsqueeze(1))
        self.squares.index_add_(0, position, p**2 * weight.unsqueeze(1))
        return p

    def __add__(self, other: _Moments) -> _Moments:
        both = _Moments(len(self.n), self.total.shape[1], self.n.device)
        both.n, both.total, both.squares = self.n + other.n, self.total + other.total, self.squares + other.squares
        return both


def _choose(sampler: Sampler, plan: SmoothingPlan) -> tuple[Tensor, _Moments]:
    count = len(sampler.x)
    first = _Moments(count, sampler.classes, sampler.x.device)

    def use(position: Tensor, logits: Tensor, live: Tensor) -> None:
        first.add(position, logits, live)

    zero = torch.zeros(count, dtype=torch.int64)
    sampler.visit("select", zero, zero + plan.n0, use)
    return first.total.argmax(dim=1), first


def _enough(plan: SmoothingPlan, lower: Tensor, moments: _Moments, chosen: Tensor, n: Tensor) -> Tensor:
    """Foreseen with the normal law, which decides when to stop and nothing else."""
    own = chosen.unsqueeze(1)
    mean = (moments.total.gather(1, own).squeeze(1) / moments.n).cpu()
    second = (moments.squares.gather(1, own).squeeze(1) / moments.n).cpu()
    deviation = (second - mean**2).clamp_min(0).sqrt()
    bar = math.sqrt(-2 * math.log(plan.failure))
    now = radii.one_sided(lower.clamp_min(0).numpy(), plan.sigma, plan.alpha)
    if plan.decide_radius is not None:
        best = (mean + bar * deviation / n.sqrt() - math.log(plan.failure) / n).clamp(0, 1)
        hopeless = radii.one_sided(best.numpy(), plan.sigma, plan.alpha) < plan.decide_radius
        return torch.from_numpy((now >= plan.decide_radius) | hopeless)
    assert plan.tolerance is not None
    most = plan.failure ** (1 / plan.samples)
    full = (mean - bar * deviation / math.sqrt(plan.samples)).clamp(0, most)
    return torch.from_numpy(radii.one_sided(full.numpy(), plan.sigma, plan.alpha) - now <= plan.tolerance)
