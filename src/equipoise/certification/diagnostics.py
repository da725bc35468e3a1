"""Estimates of how a smoothed classifier behaves under attack [SmoothMix, Table 1, Figures 2, 3];
no certificates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.certification.certificate import SmoothingPlan
from equipoise.certification.sampler import Sampler, SamplerOptions
from equipoise.core import ascent, checks, geometry, losses
from equipoise.core.geometry import per_example
from equipoise.core.modes import inference
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat


class AveragedClassifier(nn.Module):
    """The smoothed classifier as a differentiable module: log mean softmax(f(x + noise))
    [Salman2019].

    The `copies` noises are the same for every image and every call, so attacks can follow a
    deterministic function.
    """

    noise: Tensor

    def __init__(
        self,
        model: nn.Module,
        sigma: float,
        image_shape: tuple[int, ...],
        *,
        copies: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checks.positive("sigma", sigma)
        checks.whole("copies", copies, least=1)
        self.model = model
        self.register_buffer(
            "noise", sigma * stream(seed, "average", torch.arange(copies)).normal(*image_shape)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        copies = len(self.noise)
        noisy = x.unsqueeze(1) + self.noise.to(x.dtype)
        log_p = F.log_softmax(self.model(noisy.flatten(0, 1)), dim=1).view(len(x), copies, -1)
        return (
            torch.logsumexp(log_p, dim=1)
            - torch.tensor(copies, dtype=log_p.dtype, device=x.device).log()
        )


def attack_in_ball(
    averaged: AveragedClassifier, x: Tensor, y: Tensor, radius: float, steps: int = 20
) -> Tensor:
    """(B, C, H, W) the last iterate of PGD in the ℓ2 ball: steps of 2.5·radius/steps that raise the
    loss at y.

    Every image moves. An attack that is to break a classifier may leave misclassified images where
    they are, but then the mean confidence over a data set is not that at adversarial images.
    """
    threat = Threat("l2", radius)
    with inference(averaged):
        return ascent.last(
            ascent.ascend(
                lambda point: losses.cross_entropy(averaged(point), y),
                x,
                norm="l2",
                step_size=2.5 * radius / steps,
                steps=steps,
                project=lambda point: geometry.project(point, x, threat),
            )
        )


@torch.no_grad()
def vote_shares(
    model: nn.Module,
    x: Tensor,
    plan: SmoothingPlan,
    stream: Stream,
    options: SamplerOptions | None = None,
) -> Tensor:
    """(B, K) share of the votes of each class: its estimated confidence."""
    with inference(model):
        zero = torch.zeros(len(x), dtype=torch.int64)
        return (
            Sampler(model, x, stream, plan, options).votes("shares", zero, zero + plan.samples)
            / plan.samples
        )


def interpolate(x: Tensor, x_adv: Tensor, ratio: Tensor) -> Tensor:
    """(1 − λ)·x + λ·x_adv with a ratio λ (B,) for every image."""
    scale = per_example(ratio.to(x), x)
    return ((1 - scale) * x + scale * x_adv).clamp(0, 1)


def mixing_ratios(
    model: nn.Module,
    x: Tensor,
    x_adv: Tensor,
    y: Tensor,
    *,
    plan: SmoothingPlan,
    stream: Stream,
    options: SamplerOptions | None = None,
) -> Tensor:
    """(B,) smallest λ in [0, 1] at which (1 − λ)·x + λ·x_adv is no longer classified as y:
    equal-confidence ratio.

    By bisection with the same noise at every λ; 0 where the clean image is misclassified, NaN where
    the adversarial one is not.
    """

    def is_kept(ratio: Tensor) -> Tensor:
        return (
            vote_shares(model, interpolate(x, x_adv, ratio), plan, stream, options).argmax(dim=1)
            == y.cpu()
        )

    low, high = torch.zeros(len(x)), torch.ones(len(x))
    at_start, at_end = is_kept(low), is_kept(high)
    for _ in range(7):  # to within 1/128
        middle = (low + high) / 2
        kept = is_kept(middle)
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return torch.where(at_start, torch.where(at_end, torch.nan, high), 0.0)
