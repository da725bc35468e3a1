"""Plain training: the loss on the images as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training.objective import Memory, Objective, ObjectiveOutput, cross_entropy, right


@dataclass(frozen=True, kw_only=True)
class Standard(Objective):
    r"""Cross-entropy: :math:`\ell(f(x), y)`."""

    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        logits = model(x)
        return ObjectiveOutput(cross_entropy(logits, y, self.label_smoothing), right(logits, y))
