"""Evaluation mode with frozen parameters, as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def inference(*modules: nn.Module | None) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside; every submodule and parameter as before outside.

    Each submodule has its own flag: the frozen base of a mixture that is being trained stays in evaluation mode.
    """
    present = [module for module in modules if module is not None]
    training = {sub: sub.training for module in present for sub in module.modules()}
    learning = {p: p.requires_grad for module in present for p in module.parameters()}
    try:
        for sub in training:
            sub.training = False
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for sub, flag in training.items():
            sub.training = flag
        for parameter, flag in learning.items():
            parameter.requires_grad_(flag)
