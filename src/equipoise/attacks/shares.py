"""Which images each of several processes attacks."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.attacks.attack_state import AttackState
from equipoise.core import parallel


class Shares:
    """The images that this process attacks, of N that several processes attack together.

    Which images survive, and therefore cost most, is not known before. So they are dealt out anew before every stage.
    The results do not change: those of an image do not depend on the images that are attacked beside it.

    Args:
        own: (N,) whether this process attacks the image first; every image belongs to one process.
    """

    def __init__(self, own: Tensor) -> None:
        self.own = own

    def deal(self, state: AttackState) -> None:
        """Divide the images that survive so far: every process gets as many that are near to breaking as the others."""
        if self.exchange(state) == 1:
            return
        left = state.survived.nonzero().squeeze(1)
        by_margin = left[state.margin_ratio[left].argsort(stable=True)]
        self.own = torch.zeros_like(self.own)
        self.own[parallel.world().shard(by_margin)] = True

    def exchange(self, state: AttackState) -> int:
        """Tell every process what the others know about their images; returns the number of processes."""
        rows = self.own.nonzero().squeeze(1)
        parts = parallel.gather((rows, state.take(rows)))
        for known_rows, known in parts:
            state.put(known_rows, known)
        return len(parts)
