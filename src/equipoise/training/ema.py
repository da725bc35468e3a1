"""A running average of the weights: steadier than the last step, and free."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def share(decay: float, step: int) -> float:
    """What the weights of optimiser step `step` count: 1 − decay, and more at first, so that the start is forgotten."""
    return 1 - min(decay, (1 + step) / (10 + step))


class Average:
    """A copy of a module whose weights and statistics follow the module's slowly; the rest is copied, bit by bit.

    The rest: counters, buffers that are infinite, such as the log-odds of 0, and layers whose own weights are frozen:
    an average would lose the sign of a zero, and with it their digest.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False).eval()
        live, kept = [*module.parameters(), *module.buffers()], [*self.module.parameters(), *self.module.buffers()]
        frozen = {id(value) for layer in module.modules() if _frozen(layer)
                  for value in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))}
        moves = [value.is_floating_point() and id(value) not in frozen and bool(value.isfinite().all())
                 for value in live]
        self._live, self._kept = _pick(live, moves), _pick(kept, moves)
        still = [not each for each in moves]
        self._now, self._copied = _pick(live, still), _pick(kept, still)

    @torch.no_grad()
    def follow(self, weight: float | Tensor) -> None:
        """kept ← kept + weight · (live − kept)."""
        way = torch._foreach_sub([live.detach() for live in self._live], self._kept)
        torch._foreach_mul_(way, weight)
        torch._foreach_add_(self._kept, way)
        if self._copied:
            torch._foreach_copy_(self._copied, self._now)


def _frozen(layer: nn.Module) -> bool:
    """Whether a layer has weights of its own and none of them learns."""
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(weight.requires_grad for weight in own)


def _pick(values: list[Tensor], chosen: list[bool]) -> list[Tensor]:
    return [value for value, take in zip(values, chosen, strict=True) if take]
