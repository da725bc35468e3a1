"""The mixture as a module: images in, logits out, like any other classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import checks
from equipoise.mixing.rules import gate_of, mix


class MixedClassifier(nn.Module):
    """log((1 − α)·softmax(g(x)) + α·softmax(h(x))) [Bai2024, Eq. (3.4)].

    Train or evaluation mode never changes the formula; it only reaches the bases, as in any module.

    Args:
        accurate: g, images (B, C, H, W) in [0, 1] → logits (B, K).
        robust: h, likewise, with the same K.
        alpha: weight of the robust side, in [0, 1].
    """

    gate: Tensor

    def __init__(self, accurate: nn.Module, robust: nn.Module, alpha: float) -> None:
        super().__init__()
        checks.within("alpha", alpha, 0, 1)
        self.accurate = accurate
        self.robust = robust
        self.register_buffer("gate", gate_of(float(alpha)))

    @property
    def alpha(self) -> float:
        """Weight of the robust side."""
        return float(torch.sigmoid(self.gate))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        g, h = self.accurate(x), self.robust(x)
        checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                       (tuple(g.shape), tuple(h.shape)))
        return mix(F.log_softmax(g, dim=1), F.log_softmax(h, dim=1), self.gate)

    def extra_repr(self) -> str:
        """The one number of the formula."""
        return f"alpha={self.alpha:g}"
