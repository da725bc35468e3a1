"""Base classifiers of one pixel whose smoothed probabilities are known exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.core.rng import Stream

Floats = NDArray[np.float64]


class Bins(nn.Module):
    """The class whose centre is nearest: linear logits 2·c·x − c², so class regions are
    intervals."""

    def __init__(self, centres: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("centres", torch.tensor(centres))
        self.cuts = np.array([(a + b) / 2 for a, b in pairwise(centres)])

    def forward(self, x: Tensor) -> Tensor:
        centres: Tensor = self.get_buffer("centres")
        return 2 * x.flatten(1)[:, :1] * centres - centres**2

    def smoothed(self, x: Tensor, sigma: float) -> Floats:
        """(B, K) probability of each class under N(0, sigma²)."""
        edges = np.concatenate([[-np.inf], self.cuts, [np.inf]])
        below = ndtr((edges[None] - x.double().flatten(1)[:, :1].numpy()) / sigma)
        return np.asarray(np.diff(below, axis=1))


class Probit(nn.Module):
    """Probabilities Φ((x − ½)/τ) and the rest: smoothing keeps the form, with √(τ² + σ²)."""

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = tau

    def forward(self, x: Tensor) -> Tensor:
        z = (x.flatten(1)[:, 0] - 0.5) / self.tau
        return torch.stack((torch.special.log_ndtr(z), torch.special.log_ndtr(-z)), dim=1)

    def smoothed(self, x: Tensor, sigma: float) -> Floats:
        z = (x.double().flatten(1)[:, 0].numpy() - 0.5) / np.hypot(self.tau, sigma)
        return np.stack((ndtr(z), ndtr(-z)), axis=1)


def images(count: int, seed: int = 0) -> Tensor:
    """(count, 1, 1, 1) uniform over [0, 1]."""
    return random_stream(count, seed).at("image").uniform(1, 1, 1)


def random_stream(count: int, seed: int = 0) -> Stream:
    """The random stream of images 0 … count − 1."""
    return rng.stream(seed, "certify", torch.arange(count))


def key_of(stream: Stream) -> Tensor:
    """(2,) the words of its key."""
    return rng.key_words(stream.key, stream.index.device)


def probability_of(p: Floats, top: Tensor) -> Floats:
    """(B,) the true probability of each image's top class."""
    return np.asarray(p[np.arange(len(p)), top.numpy()])
