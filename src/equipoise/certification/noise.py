"""Gaussian noise as a function of (seed, purpose, image index, sample number), and of nothing else.

A sample has its own place in the counter space of Philox, so that batch size, order, device, resumption
and the number of processes leave every noisy image as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.rng import Stream, philox

_WORD = 0xFFFFFFFF


def key_of(chance: Stream) -> Tensor:
    """(2,) the words of a stream's key on the device of its images."""
    return torch.tensor([chance.key & _WORD, chance.key >> 32], device=chance.index.device)


def words(key: Tensor, index: Tensor, sample: Tensor, size: int) -> list[Tensor]:
    """Four times (R, ⌈size / 4⌉) 32-bit words as int64 for R pairs of an image index and a sample number."""
    blocks = (size + 3) // 4
    place = sample.unsqueeze(1) * blocks + torch.arange(blocks, device=index.device)
    image = index.unsqueeze(1).expand_as(place)
    k0, k1 = key.unbind()
    return philox((place & _WORD, place >> 32, image & _WORD, image >> 32), (k0, k1))


def gaussian(key: Tensor, index: Tensor, sample: Tensor, shape: torch.Size) -> Tensor:
    """(R, *shape) float32, standard normal, by the Box-Muller transform of 32-bit pairs (|z| < 6.8)."""
    size = math.prod(shape)
    first, second, third, fourth = words(key, index, sample, size)
    # Stacked once, at the end: a compiler then runs the generator once per four numbers.
    drawn = torch.stack((*_pair(first, second), *_pair(third, fourth)), dim=2)
    return drawn.flatten(1)[:, :size].reshape(-1, *shape)


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    # A word near 2³² rounds to 1, whose logarithm is the 0 it should be; none rounds to 0.
    radius = first.to(torch.float32).add(0.5).mul(2.0**-32).log().mul(-2).sqrt()
    angle = second.to(torch.float32).mul(2 * math.pi * 2.0**-32)
    return radius * angle.cos(), radius * angle.sin()


def noisy(x: Tensor, key: Tensor, index: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
    """(R, C, H, W) x + sigma·z; nothing is clamped."""
    return x + sigma * gaussian(key, index, sample, x.shape[1:]).to(x.dtype)
