"""Noise that certificates survive in floating point [Voracek2023].

In floating point x + noise is rounded, and the rounding depends on x: a classifier can read from the last
bits which image it was given, so the theorem about Gaussian noise does not cover it. Here the base
classifier is, by definition, the network behind rounding to whole pixel levels of 1/255. That is a function
on all of ℝᵈ, so the theorem holds for it; and on an 8-bit image rounding x + ε is the same as adding whole
levels drawn with the probabilities of round(ε), which integers do exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equipoise.certification.noise import words
from equipoise.core import checks

LEVELS = 255
# Doubles give the law of one pixel to within this in total variation: some thousand cells, each within 2⁻⁵².
ERROR_PER_PIXEL = 1e-12


@dataclass(frozen=True)
class NoiseTable:
    """Alias table [Walker1977] of a law on whole numbers: one uniform column, one coin."""

    lowest: int
    bits: int  # 2^bits columns
    threshold: Tensor  # (2^bits,) int64: the coin below it keeps the column, of 2^(64 − bits)
    alias: Tensor  # (2^bits,) int64: the column taken otherwise

    def to(self, device: torch.device) -> NoiseTable:
        """The same table on another device."""
        return NoiseTable(self.lowest, self.bits, self.threshold.to(device), self.alias.to(device))


def probabilities(deviation: float) -> tuple[int, list[float]]:
    """Lowest whole number and P(round(deviation·z) = k) from there on; the last cells hold the tails."""
    reach = math.ceil(9.5 * deviation) + 1

    def beyond(level: float) -> float:
        return 0.5 * math.erfc(level / deviation / math.sqrt(2))

    half = [beyond(k - 0.5) - beyond(k + 0.5) for k in range(1, reach)] + [beyond(reach - 0.5)]
    return -reach, [*reversed(half), 1 - 2 * beyond(0.5), *half]


@lru_cache(maxsize=16)
def table(sigma: float) -> NoiseTable:
    """The law of round(255·ε), ε ~ N(0, sigma²), for coins of 64 bits less the column's."""
    lowest, chances = probabilities(LEVELS * sigma)
    bits = max(1, math.ceil(math.log2(len(chances))))
    full = 1 << (64 - bits)
    mass = [round(p * (1 << 64)) for p in chances] + [0] * ((1 << bits) - len(chances))
    mass[-lowest] += (1 << 64) - sum(mass)  # whole numbers from here on: nothing else is rounded
    threshold, alias = [full] * len(mass), list(range(len(mass)))
    small = [column for column, own in enumerate(mass) if own < full]
    large = [column for column, own in enumerate(mass) if own >= full]
    while small:
        poor, rich = small.pop(), large[-1]
        threshold[poor], alias[poor] = mass[poor], rich
        mass[rich] -= full - mass[poor]
        if mass[rich] < full:
            small.append(large.pop())
    return NoiseTable(lowest, bits, torch.tensor(threshold), torch.tensor(alias))


def levels(x: Tensor) -> Tensor:
    """(B, C, H, W) images as whole pixel levels; images that are not 8-bit are refused."""
    whole = (x.double() * LEVELS).round()
    worst = float((x.double() * LEVELS - whole).abs().max()) if x.numel() else 0.0
    checks.require(worst < 1e-3, "images", "be multiples of 1/255 for the sound sampler", f"off by {worst:.3g} levels")
    return whole.to(torch.int32)


def noisy(level: Tensor, key: Tensor, index: Tensor, sample: Tensor, law: NoiseTable, dtype: torch.dtype) -> Tensor:
    """(R, C, H, W) images: (level + whole-numbered noise) / 255, the same bits for the same whole numbers."""
    size = math.prod(level.shape[1:])
    first, second, third, fourth = words(key, index, sample, 2 * size)
    moved = torch.stack((_drawn(first, second, law), _drawn(third, fourth, law)), dim=2)
    total = level + moved.flatten(1)[:, :size].reshape(level.shape)
    return total.to(dtype) / torch.full((), LEVELS, dtype=dtype, device=level.device)


def _drawn(first: Tensor, second: Tensor, law: NoiseTable) -> Tensor:
    column = first & ((1 << law.bits) - 1)
    coin = ((first >> law.bits) << 32) | second
    return torch.where(coin < law.threshold[column], column, law.alias[column]) + law.lowest


def slack(pixels: int) -> float:
    """How far any probability may be off because the law of the noise is known in doubles only."""
    return pixels * ERROR_PER_PIXEL
