"""The logits of one module with the gradients of another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, surrogate_logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


class _StraightThrough(nn.Module):
    def __init__(self, model: nn.Module, surrogate: nn.Module) -> None:
        super().__init__()
        self.model, self.surrogate = model, surrogate

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.model(x)
        out: Tensor = _OtherGradient.apply(logits, self.surrogate(x).to(logits.dtype))  # type: ignore[no-untyped-call]
        return out


def straight_through(model: nn.Module, surrogate: nn.Module) -> nn.Module:
    """A module with exactly the logits of `model` and the gradients of `surrogate`, for attacks of
    other libraries.

    The usual s + (m − s).detach() would round, and be NaN where a logit is −inf.
    """
    return _StraightThrough(model, surrogate)
