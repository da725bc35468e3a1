"""Gaussian noise on images, and what a model says on average under it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream


def draw(x: Tensor, sigma: float, count: int, stream: Stream) -> Tensor:
    """(B, S, C, H, W): S draws of N(0, sigma²) for every image."""
    return sigma * stream.at("noise").normal(count, *x.shape[1:]).to(x.dtype)


def logits(model: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """(B, S, K): the model on every image with each of its noises, in one pass."""
    found: Tensor = model((x.unsqueeze(1) + noise).flatten(0, 1))
    return found.to(x.dtype).view(*noise.shape[:2], -1)


def log_average(z: Tensor) -> Tensor:
    """(B, S, K) logits → (B, K): log of the probabilities averaged over the S noises, without forming them."""
    return torch.logsumexp(torch.log_softmax(z, dim=2), dim=1) - math.log(z.shape[1])
