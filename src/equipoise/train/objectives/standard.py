"""Plain training: the loss on the images as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from equipoise.rng import Stream
from equipoise.train.objective import Memory, Objective, Outcome, cross_entropy, right
from equipoise.train.settings import setting


@dataclass(frozen=True, kw_only=True)
class Standard(Objective):
    r"""Cross-entropy: :math:`\ell(f(x), y)`."""

    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> Outcome:
        """See :class:`Objective`."""
        logits = model(x)
        return Outcome(cross_entropy(logits, y, self.label_smoothing), right(logits, y))
