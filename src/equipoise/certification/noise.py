"""Noise as a function of (seed, purpose, image index, sample number): Gaussian, or sound in
floating point.

A sample has its own place in the counter space of Philox, so that batch size, order, device,
resumption and the number of processes do not change any noisy image.

In floating point x + noise is rounded, and the rounding depends on x: a classifier can tell from
the last bits which image it was given, so the theorem about Gaussian noise does not cover it
[Voracek2023]. With sound noise the base classifier is, by definition, the network behind rounding
to integer pixel levels of 1/255. That is a function on all of ℝᵈ, so the theorem holds for it; and
on an 8-bit image rounding x + ε is the same as adding integer levels drawn with the probabilities
of round(ε), which integer arithmetic does exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equipoise.core import checks, rng

LEVELS = 255
# Total variation error of one pixel's sound noise in doubles: some thousand cells, each within
# 2⁻⁵².
ERROR_PER_PIXEL = 1e-12


def gaussian(key: Tensor, index: Tensor, sample: Tensor, shape: torch.Size) -> Tensor:
    """(R, *shape) float32, standard normal, from uniforms of 32 bits (|z| < 6.8)."""
    return rng.random_normals(key, index, math.prod(shape), sample, bits=32).reshape(-1, *shape)


@dataclass(frozen=True)
class AliasTable:
    """Alias table [Walker1977] of a distribution on integers: one uniform column, one biased
    coin."""

    lowest: int
    bits: int  # 2^bits columns
    # (2^bits,) int64: a coin below it keeps the column; coins lie in [0, 2^(64 − bits))
    threshold: Tensor
    alias: Tensor  # (2^bits,) int64: the column taken otherwise


def rounded_normal(std: float) -> tuple[int, list[float]]:
    """Lowest integer and P(round(std·z) = k) from there on; the first and last cells hold the
    tails."""
    reach = math.ceil(9.5 * std) + 1

    def tail(level: float) -> float:
        return 0.5 * math.erfc(level / std / math.sqrt(2))

    half = [tail(k - 0.5) - tail(k + 0.5) for k in range(1, reach)] + [tail(reach - 0.5)]
    return -reach, [*reversed(half), 1 - 2 * tail(0.5), *half]


@lru_cache(maxsize=16)
def alias_table(sigma: float, device: torch.device | None = None) -> AliasTable:
    """The distribution of round(255·ε), ε ~ N(0, sigma²), in units of 2⁻⁶⁴."""
    lowest, probabilities = rounded_normal(LEVELS * sigma)
    bits = max(1, math.ceil(math.log2(len(probabilities))))
    full = 1 << (64 - bits)
    mass = [round(p * (1 << 64)) for p in probabilities] + [0] * ((1 << bits) - len(probabilities))
    mass[-lowest] += (1 << 64) - sum(mass)  # integers from here on: nothing else is rounded
    threshold, alias = [full] * len(mass), list(range(len(mass)))
    small = [column for column, own in enumerate(mass) if own < full]
    large = [column for column, own in enumerate(mass) if own >= full]
    while small:
        receiver, donor = small.pop(), large[-1]
        threshold[receiver], alias[receiver] = mass[receiver], donor
        mass[donor] -= full - mass[receiver]
        if mass[donor] < full:
            small.append(large.pop())
    return AliasTable(
        lowest, bits, torch.tensor(threshold, device=device), torch.tensor(alias, device=device)
    )


def levels(x: Tensor) -> Tensor:
    """(B, C, H, W) images as integer pixel levels; images that are not 8-bit are refused."""
    rounded = (x.double() * LEVELS).round()
    worst = float((x.double() * LEVELS - rounded).abs().max()) if x.numel() else 0.0
    checks.require(
        worst < 1e-3,
        "images",
        "be multiples of 1/255 for the sound sampler",
        f"off by {worst:.3g} levels",
    )
    return rounded.to(torch.int32)


def noisy_levels(
    level: Tensor, key: Tensor, index: Tensor, sample: Tensor, table: AliasTable, dtype: torch.dtype
) -> Tensor:
    """(R, C, H, W) images: (level + integer noise) / 255, the same bits for the same integers."""
    size = math.prod(level.shape[1:])
    first, second, third, fourth = rng.random_blocks(key, index, 2 * size, sample)
    drawn = torch.stack((_draw(first, second, table), _draw(third, fourth, table)), dim=2)
    total = level + drawn.flatten(1)[:, :size].reshape(level.shape)
    return total.to(dtype) / torch.full((), LEVELS, dtype=dtype, device=level.device)


def _draw(first: Tensor, second: Tensor, table: AliasTable) -> Tensor:
    column = first & ((1 << table.bits) - 1)
    coin = ((first >> table.bits) << 32) | second
    return torch.where(coin < table.threshold[column], column, table.alias[column]) + table.lowest
