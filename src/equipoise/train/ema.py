"""A running average of the weights: steadier than the last step, and free."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def share(decay: float, step: int) -> float:
    """What the weights of optimiser step `step` count: 1 − decay, and more at first, so that the start is forgotten."""
    return 1 - min(decay, (1 + step) / (10 + step))


class Average:
    """A copy of a module whose weights and statistics follow the module's slowly; counters are copied.

    So are buffers that are infinite, such as the log-odds of 0: no average of them is a number.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False).eval()
        live, kept = [*module.parameters(), *module.buffers()], [*self.module.parameters(), *self.module.buffers()]
        moving = [value.is_floating_point() and bool(value.isfinite().all()) for value in live]
        self._live = [value for value, moves in zip(live, moving, strict=True) if moves]
        self._kept = [value for value, moves in zip(kept, moving, strict=True) if moves]
        self._copied = [pair for pair, moves in zip(zip(kept, live, strict=True), moving, strict=True) if not moves]

    @torch.no_grad()
    def follow(self, weight: float | Tensor) -> None:
        """kept ← kept + weight · (live − kept)."""
        way = torch._foreach_sub([live.detach() for live in self._live], self._kept)
        torch._foreach_mul_(way, weight)
        torch._foreach_add_(self._kept, way)
        for counter, now in self._copied:
            counter.copy_(now)
