"""Noisy copies of images, and attacks on the smoothed classifier inside of training: PGD and DDN
[Rony2019]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core import ascent
from equipoise.core.geometry import per_example, project_to_ball, size, steepest, where_rows
from equipoise.core.modes import inference
from equipoise.core.rng import Stream

LEVELS = 255  # of a pixel, that DDN rounds to


def draw_noise(x: Tensor, sigma: float, count: int, stream: Stream) -> Tensor:
    """(B, S, C, H, W): S draws of N(0, sigma²) for every image."""
    return sigma * stream.at("noise").normal(count, *x.shape[1:]).to(x.dtype)


def noisy_logits(model: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """(B, S, K): the model on every image with each of its noises, in one pass."""
    logits: Tensor = model((x.unsqueeze(1) + noise).flatten(0, 1))
    return logits.to(x.dtype).view(*noise.shape[:2], -1)


def log_average(z: Tensor) -> Tensor:
    """(B, S, K) logits → (B, K): log of the probabilities averaged over the S noises, without
    forming them."""
    return torch.logsumexp(torch.log_softmax(z, dim=2), dim=1) - math.log(z.shape[1])


def label_loss(z: Tensor, y: Tensor) -> Tensor:
    """(B, S, K) logits → (B,): −log of the averaged probability of the label, which the attacks
    raise."""
    return -log_average(z).gather(1, y.unsqueeze(1)).squeeze(1)


def clip_last(x_adv: Tensor, x: Tensor, eps: float | None) -> Tensor:
    """Into the ℓ2 ball, then into [0, 1]: the order of the SmoothMix code, for Consistency too.

    The SmoothAdv code has the other order, that of
    :func:`~equipoise.core.geometry.project_to_ball`. Either ends in both sets, at another point.
    """
    if eps is not None:
        delta = x_adv - x
        x_adv = x + delta * (eps / per_example(size(delta, "l2"), delta).clamp_min(max(eps, 1e-12)))
    return x_adv.clamp(0, 1)


def smoothed_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    noise: Tensor,
    *,
    eps: float | None,
    step_size: float,
    steps: int,
    clips_last: bool = False,
) -> list[Tensor]:
    """All iterates of PGD in ℓ2 that lowers the probability of the label averaged over the noises
    (B, S, C, H, W)."""

    def project(point: Tensor) -> Tensor:
        return clip_last(point, x, eps) if clips_last else project_to_ball(point, x, "l2", eps)

    with inference(model):
        return list(
            ascent.ascend(
                lambda point: label_loss(noisy_logits(model, point, noise), y),
                x,
                norm="l2",
                step_size=step_size,
                steps=steps,
                project=project,
            )
        )


def smoothed_ddn(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    noise: Tensor,
    *,
    eps: float,
    steps: int,
    gamma: float = 0.05,
) -> Tensor:
    """(B, C, H, W) the nearest adversarial image that DDN finds, shrunk to the ℓ2 ball; x where it
    finds none.

    DDN [Rony2019] as in the SmoothAdv code. Directions are gradients, with steps that fall from 1
    to 0.01 by a cosine; the norm starts at eps and shrinks by `gamma` where most noises are
    misclassified, else it grows. Every iterate is rounded to 8-bit levels. (Where the gradient is
    exactly zero that code steps at random; here it does not.)
    """
    furthest = size(torch.maximum(x, 1 - x), "l2")
    norm, best_norm = torch.full_like(furthest, eps), furthest.clone()
    delta, best = torch.zeros_like(x), torch.zeros_like(x)
    with inference(model):
        for step in range(steps):
            with torch.enable_grad():
                point = (x + delta).detach().requires_grad_()
                z = noisy_logits(model, point, noise)
                gradient = torch.autograd.grad(label_loss(z, y).sum(), point)[0]
            # Not `one_hot`, which waits for the GPU.
            votes = (
                z.detach().argmax(dim=2, keepdim=True) == torch.arange(z.shape[2], device=z.device)
            ).sum(dim=1)
            is_adversarial, length = votes.argmax(dim=1) != y, size(delta, "l2")
            is_better = is_adversarial & (length < best_norm)
            best, best_norm = (
                where_rows(is_better, delta, best),
                torch.where(is_better, length, best_norm),
            )
            rate = 0.01 + 0.99 * (1 + math.cos(math.pi * (step + 1) / steps)) / 2
            delta = delta + rate * steepest(gradient, "l2")
            norm = torch.minimum(
                norm * torch.where(is_adversarial, 1 - gamma, 1 + gamma).to(norm.dtype), furthest
            )
            delta = delta * per_example(norm / size(delta, "l2").clamp_min(1e-12), delta)
            delta = (torch.round((x + delta) * LEVELS) / LEVELS).clamp(0, 1) - x
    best = best * per_example(eps / best_norm.clamp_min(max(eps, 1e-12)), best)
    return (x + torch.round(best * LEVELS) / LEVELS).detach()
