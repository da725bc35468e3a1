"""Certificates for mean probabilities instead of votes, with a confidence bound for means of
numbers in [0, 1].

The bound is a betting confidence sequence [WaudbySmith2024]. For every candidate m, bet on "the
mean is above m" with stakes that depend on earlier samples only. If the mean is at most m, the
capital is a supermartingale, so it ever reaches 1 / failure with probability at most `failure`
(Ville's inequality); when it does, m is rejected. This holds at any stopping time, so stopping
early costs nothing.
"""

from __future__ import annotations

import math

import torch
from scipy.special import ndtri
from torch import Tensor

from equipoise.certification import radii
from equipoise.certification.certificate import Certificate, SmoothingPlan
from equipoise.certification.sampler import Sampler

_GROWTH = 1.3  # of the sample size from round to round; stakes are updated at each
_LARGEST_STAKE = 0.95  # of the stake that could lose everything
_PRIOR = 0.05  # pseudo-deviation in the estimated variance


class BettingBound:
    """Lower confidence bounds of B means: the log capital of every candidate mean."""

    def __init__(
        self, count: int, plan: SmoothingPlan, device: torch.device, candidates: int
    ) -> None:
        highest = float(ndtri(plan.failure ** (1 / plan.samples)))
        # Even steps of the quantile are even steps of the radius; radii need no mean below one
        # half.
        z = torch.linspace(0, highest, candidates, dtype=torch.float64, device=device)
        self.candidates = torch.special.ndtr(z).clamp_(max=1 - 1e-12)
        self.threshold = -math.log(plan.failure)
        self.capital = torch.zeros(count, candidates, dtype=torch.float64, device=device)
        self.rejected = torch.zeros(count, candidates, dtype=torch.bool, device=device)
        self.stakes = torch.zeros_like(self.capital)

    def update_stakes(self, n: Tensor, total: Tensor, squares: Tensor) -> None:
        """Near-optimal stakes (μ − m) / (v + (μ − m)²) from the mean and variance of all samples so
        far."""
        mean = total / n
        variance = ((squares - n * mean**2).clamp_min(0) + _PRIOR) / (n + 1)
        edge = (mean.unsqueeze(1) - self.candidates).clamp_min(0)
        best = edge / (variance.unsqueeze(1) + edge**2)
        self.stakes = torch.minimum(best, _LARGEST_STAKE / self.candidates)

    def bet(self, position: Tensor, value: Tensor, valid: Tensor) -> None:
        """Bet on R samples at the stakes of their images."""
        growth = torch.log1p(self.stakes[position] * (value.unsqueeze(1) - self.candidates))
        self.capital.index_add_(0, position, growth * valid.unsqueeze(1))

    def lower(self) -> Tensor:
        """(B,) the bound so far: the largest candidate up to which all have been rejected; 0 if
        none was."""
        self.rejected |= self.capital >= self.threshold
        count = self.rejected.to(torch.int64).cumprod(dim=1).sum(dim=1)
        return torch.where(count > 0, self.candidates[(count - 1).clamp_min(0)], 0.0)


def certify_mean_probabilities(
    sampler: Sampler, plan: SmoothingPlan, candidates: int = 512
) -> Certificate:
    """Certificates for the mean probabilities; rounds grow geometrically and may end early.

    `candidates` is the number of grid points of the confidence bound.
    """
    device, count = sampler.x.device, len(sampler.x)
    first = _Moments(count, sampler.num_classes, device)
    zero = torch.zeros(count, dtype=torch.int64)
    sampler.accumulate(
        "select",
        zero,
        zero + plan.n0,
        lambda position, logits, valid: first.add(position, _probabilities(logits), valid),
    )
    top = first.total.argmax(dim=1)
    moments, bound = (
        _Moments(count, sampler.num_classes, device),
        BettingBound(count, plan, device, candidates),
    )

    def bet(position: Tensor, logits: Tensor, valid: Tensor) -> None:
        p = _probabilities(logits)
        moments.add(position, p, valid)
        bound.bet(position, p.gather(1, top[position].unsqueeze(1)).squeeze(1), valid)

    done, n = torch.zeros(count, dtype=torch.bool), zero
    lower, size = torch.zeros(count, dtype=torch.float64), plan.n0
    while not bool(done.all()):
        bound.update_stakes(
            *(before + since for before, since in zip(first.of(top), moments.of(top), strict=True))
        )
        stop = torch.where(done, n, min(size, plan.samples))
        sampler.accumulate("estimate", n, stop, bet)
        n = stop
        lower = bound.lower().cpu() - sampler.probability_error
        done |= n >= plan.samples
        if plan.tolerance is not None or plan.decide_radius is not None:
            done |= _is_enough(plan, lower, moments, top, n)
        size = math.ceil(size * _GROWTH)
    lower = lower.clamp_min(0)
    radius = torch.from_numpy(radii.one_sided(lower.numpy(), plan.sigma, plan.alpha))
    return Certificate.of(
        top=top.cpu(),
        radius=radius,
        lower=lower,
        votes=moments.total.cpu(),
        n=n,
        selection_samples=plan.n0,
        failure=plan.failure,
    )


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double(), dim=1).clamp_(0, 1)


class _Moments:
    """Number, sum and sum of squares of every class's probability, per image."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self.n = torch.zeros(count, dtype=torch.float64, device=device)
        self.total = torch.zeros(count, classes, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.total)

    def add(self, position: Tensor, p: Tensor, valid: Tensor) -> None:
        """Add the probabilities (R, K) of R samples."""
        weight = valid.to(p.dtype)
        self.n.index_add_(0, position, weight)
        self.total.index_add_(0, position, p * weight.unsqueeze(1))
        self.squares.index_add_(0, position, p**2 * weight.unsqueeze(1))

    def of(self, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number, sum and sum of squares (B,) of one class per image."""
        own = classes.unsqueeze(1)
        return self.n, self.total.gather(1, own).squeeze(1), self.squares.gather(1, own).squeeze(1)


def _is_enough(
    plan: SmoothingPlan, lower: Tensor, moments: _Moments, top: Tensor, n: Tensor
) -> Tensor:
    """(B,) whether to stop, predicted with the normal approximation; it decides when to stop and
    nothing else."""
    drawn, total, squares = moments.of(top)
    mean = (total / drawn).cpu()
    std = ((squares / drawn).cpu() - mean**2).clamp_min(0).sqrt()
    width = math.sqrt(-2 * math.log(plan.failure))
    best = (mean + width * std / n.sqrt() - math.log(plan.failure) / n).clamp(0, 1)
    full = (mean - width * std / math.sqrt(plan.samples)).clamp(
        0, plan.failure ** (1 / plan.samples)
    )
    met = torch.ones(len(n), dtype=torch.bool)
    for own in plan.per_alpha:
        radius, largest, at_end = (
            radii.one_sided(p.clamp_min(0).numpy(), own.sigma, own.alpha)
            for p in (lower, best, full)
        )
        if own.decide_radius is not None:
            met &= torch.from_numpy((radius >= own.decide_radius) | (largest < own.decide_radius))
        if own.tolerance is not None:
            met &= torch.from_numpy(at_end - radius <= own.tolerance)
    return met
