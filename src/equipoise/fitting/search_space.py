"""Where the numbers of a map are looked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIMITS = ((0.01, 50.0), (0.5, 8.0), (-3.0, 1.0))  # s, p, c: beyond, a change in the last digits changes answers
NAMES = ("s", "p", "c")


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: s on a logarithmic scale, p and c on linear ones. The default is the paper's for CIFAR-10."""

    s: tuple[float, float] = (0.05, 5.0)
    p: tuple[float, float] = (1.0, 4.0)
    c: tuple[float, float] = (-1.1, 0.0)
    steps: int = 8

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The values of s, p and c on the grid."""
        low, high = (math.log(end) for end in self.s)
        return (torch.linspace(low, high, self.steps, dtype=torch.float64).exp(),
                torch.linspace(*self.p, self.steps, dtype=torch.float64),
                torch.linspace(*self.c, self.steps, dtype=torch.float64))

    def widened(self, edges: Sequence[str]) -> SearchSpace:
        """One more half of the box beyond every edge named, such as "s high"."""
        ends = {"s": [math.log(end) for end in self.s], "p": list(self.p), "c": list(self.c)}
        for name, (least, most) in zip(NAMES, LIMITS, strict=True):
            low, high = ends[name]
            least, most = (math.log(least), math.log(most)) if name == "s" else (least, most)
            half = (high - low) / 2
            ends[name] = [max(least, low - half) if f"{name} low" in edges else low,
                          min(most, high + half) if f"{name} high" in edges else high]
        low, high = (math.exp(end) for end in ends["s"])
        return SearchSpace((low, high), (ends["p"][0], ends["p"][1]), (ends["c"][0], ends["c"][1]), self.steps)

    def edges(self, candidate: Tensor) -> list[str]:
        """The edges a candidate sits on, unless nothing lies beyond them."""
        found = []
        for name, value, (low, high), (least, most) in zip(
                NAMES, candidate.tolist(), (self.s, self.p, self.c), LIMITS, strict=True):
            near = 1e-6 * max(abs(low), abs(high))
            found += [f"{name} low"] if value <= low + near and low > least + near else []
            found += [f"{name} high"] if value >= high - near and high < most - near else []
        return found
