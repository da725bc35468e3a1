"""What attacks inside training follow on a GPU: a fast twin of a gated mixture, and a pass that is recorded once.

A training attack repeats one small pass thousands of times, and a GPU spends most of it being told what to do. The
bases never change, so their batch norms are folded away once; the gate is the one that learns, and a recorded pass
reads its weights where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise.attacks.cuda_graphs import CudaGraphFunction
from equipoise.attacks.fused import swift
from equipoise.core import device as devices
from equipoise.core.ascent import value_and_gradient
from equipoise.core.modes import inference
from equipoise.mixing.gated import GatedClassifier

EXAMPLES = 4  # images on which the twin must agree with the mixture
Loss = Callable[..., Tensor]  # a mixture, images (B, …) and other tensors → (B,)
_known: WeakKeyDictionary[GatedClassifier, tuple[Hashable, Twin]] = WeakKeyDictionary()


def slope(model: GatedClassifier, x: Tensor, loss: Loss, key: Hashable) -> Callable[..., tuple[Tensor, ...]]:
    """Images (B, …) and other tensors → (B,) a loss of a mixture, and its gradient by the images.

    Args:
        model: the mixture, in inference mode.
        x: the first images.
        loss: of a mixture, images and the other tensors; it reads nothing else that changes.
        key: equal keys, equal losses.
    """
    return twin(model, x).slope(loss, key) if x.is_cuda else partial(_slope, loss, model)


class Twin:
    """A mixture that computes the same with fewer operations; its gate is the other's own."""

    def __init__(self, model: GatedClassifier, x: Tensor) -> None:
        with inference(model), devices.exactly(x.device):
            made = swift(model, x[:EXAMPLES])
        # Never the mixture itself: a twin is forgotten with the last who holds the mixture.
        self.model = made if isinstance(made, GatedClassifier) and made is not model else model.with_range(*model.range)
        self.model.network = model.network
        self.recorded: dict[Hashable, CudaGraphFunction] = {}
        self.pool: list[Any] = []

    def slope(self, loss: Loss, key: Hashable) -> Callable[..., tuple[Tensor, ...]]:
        """As :func:`slope`, of the twin; recorded when it is called for the second time."""
        if key not in self.recorded:
            self.recorded[key] = CudaGraphFunction(partial(_slope, loss, self.model), self.pool)
        return self.recorded[key]


def twin(model: GatedClassifier, x: Tensor) -> Twin:
    """The twin of a mixture that is being trained; another one as soon as its bases change or anything moves."""
    bases = [value for base in (model.accurate, model.robust) for value in base.state_dict().values()]
    kind = x.device.type
    state = (tuple((value.data_ptr(), value._version) for value in bases),
             tuple(value.data_ptr() for value in model.network.state_dict().values()), model.extra_repr(),
             torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if model not in _known or _known[model][0] != state:
        _known[model] = (state, Twin(model, x))
    return _known[model][1]


def _slope(loss: Loss, model: GatedClassifier, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    kind = x.device.type
    # Casts that are remembered from outside would stay those of the weights at the time of the recording.
    uncached = torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
                              cache_enabled=False)
    with uncached:
        return value_and_gradient(lambda at: loss(model, at, *others))(x)
