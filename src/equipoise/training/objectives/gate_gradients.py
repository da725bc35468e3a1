"""Fast gradients of a mixture with a gate, for the attacks that train it.

An attack on a gate repeats one small pass thousands of times, most of which is launch overhead on a
GPU. The base classifiers never change, so their batch norms, and in reduced precision their
activations, are fused once; a captured pass reads the weights of the gate in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from equipoise.attacks.conv_relu import fuse_activations_if
from equipoise.attacks.cuda_graphs import CudaGraphFunction
from equipoise.attacks.fused import agree, fuse
from equipoise.attacks.prepared import EXAMPLES, TOLERANCES
from equipoise.core import ascent
from equipoise.core import device as devices
from equipoise.core.modes import inference
from equipoise.mixing.gated import GatedClassifier

Loss = Callable[..., Tensor]  # a mixture, images (B, …) and other tensors → (B,)
LossAndGradient = Callable[..., tuple[Tensor, ...]]  # images and other tensors → (B,) and (B, …)
_cache: WeakKeyDictionary[GatedClassifier, tuple[Hashable, FusedMixture]] = WeakKeyDictionary()


def loss_and_gradient(
    model: GatedClassifier, x: Tensor, loss: Loss, key: Hashable
) -> LossAndGradient:
    """A function of images (B, …) and other tensors: (B,) a loss of the mixture, and its gradient
    by the images.

    The mixture is in evaluation mode, `x` are the first images, and the loss reads nothing but its
    arguments; losses with equal keys are taken to be equal.
    """
    if x.is_cuda:
        return fused_mixture(model, x).loss_and_gradient(loss, key)
    return partial(_loss_and_gradient, loss, model)


class FusedMixture:
    """A copy of a mixture with fused base classifiers; it shares the gate of the original."""

    def __init__(self, model: GatedClassifier, x: Tensor) -> None:
        x = x[:EXAMPLES]  # on which copies must agree with the mixture
        with inference(model), devices.full_precision(x.device):
            fused = fuse(model, x)
        # Never the mixture itself, which would keep it alive in the cache.
        is_copy = fused is not model
        self.model = (
            fused
            if isinstance(fused, GatedClassifier) and is_copy
            else model.with_range(*model.alpha_range)
        )
        self.model.network = model.network
        if is_copy and torch.is_autocast_enabled(x.device.type):
            self._fuse_activations(x, torch.get_autocast_dtype(x.device.type))
        self.captured: dict[Hashable, CudaGraphFunction] = {}
        self.pool = torch.cuda.graph_pool_handle() if x.is_cuda else None

    @torch.no_grad()
    def _fuse_activations(self, x: Tensor, dtype: torch.dtype) -> None:
        """Give the base classifiers weights of reduced precision and fused activations, if their
        logits agree on x."""

        def agrees(faster: nn.Module) -> bool:
            logits = zip(faster.base_outputs(x)[:2], self.model.base_outputs(x)[:2], strict=True)  # type: ignore[operator]
            return all(
                agree(fast.float(), known.float(), TOLERANCES[dtype]) for fast, known in logits
            )

        with inference(self.model):
            faster = fuse_activations_if(agrees, self.model, dtype)
        if isinstance(faster, GatedClassifier):
            faster.network = self.model.network
            self.model = faster

    def loss_and_gradient(self, loss: Loss, key: Hashable) -> LossAndGradient:
        """As :func:`loss_and_gradient`, of the copy; captured when it is called for the third
        time."""
        if key not in self.captured:
            self.captured[key] = CudaGraphFunction(
                partial(_loss_and_gradient, loss, self.model), self.pool
            )
        return self.captured[key]


def fused_mixture(model: GatedClassifier, x: Tensor) -> FusedMixture:
    """The cached copy of a mixture; a new one when its base classifiers change or anything moves in
    memory."""
    bases = [
        value for base in (model.accurate, model.robust) for value in base.state_dict().values()
    ]
    device = x.device.type
    state = (
        tuple((value.data_ptr(), value._version) for value in bases),
        tuple(value.data_ptr() for value in model.network.state_dict().values()),
        model.extra_repr(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )
    if model not in _cache or _cache[model][0] != state:
        _cache[model] = (state, FusedMixture(model, x))
    return _cache[model][1]


def _loss_and_gradient(
    loss: Loss, model: GatedClassifier, x: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    device = x.device.type
    # Cached casts would stay those of the weights at the time of the capture.
    with torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        cache_enabled=False,
        enabled=torch.is_autocast_enabled(device),
    ):
        return ascent.value_and_gradient(lambda point: loss(model, point, *others))(x)
