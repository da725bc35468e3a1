"""A running average of the weights: steadier than the last step, and free."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def share(decay: float, step: int) -> float:
    """What the weights of optimiser step `step` count: 1 − decay, and more at first, so that the start is forgotten."""
    return 1 - min(decay, (1 + step) / (10 + step))


class Average:
    """A copy of a module whose weights and statistics follow the module's slowly; counters are copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False).eval()
        self._live = [*module.parameters(), *module.buffers()]
        self._kept = [*self.module.parameters(), *self.module.buffers()]

    @torch.no_grad()
    def follow(self, weight: float | Tensor) -> None:
        """kept ← kept + weight · (live − kept)."""
        moving = [(kept, live) for kept, live in zip(self._kept, self._live, strict=True) if kept.is_floating_point()]
        kept, live = [pair[0] for pair in moving], [pair[1].detach() for pair in moving]
        way = torch._foreach_sub(live, kept)
        torch._foreach_mul_(way, weight)
        torch._foreach_add_(kept, way)
        for counter, now in zip(self._kept, self._live, strict=True):
            if not counter.is_floating_point():
                counter.copy_(now)
