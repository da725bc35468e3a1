"""Cost of a prediction in parameters and floating-point operations, for both base models and their
mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.core import memory
from equipoise.core.modes import inference
from equipoise.core.results import Cost
from equipoise.data import Dataset, pixels
from equipoise.mixing import MixedClassifier


class _FlopCounter(TorchDispatchMode):
    """Adds up the operations inside the context by torch's formulas.

    `torch.utils.flop_counter.FlopCounterMode` does the same, but imports torch's compiler, which
    takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import (
            flop_registry,
        )  # which imports Triton where it is installed

        self.total, self.formulas = 0, flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping the compiler imports it

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, formula = kwargs or {}, self.formulas.get(func.overloadpacket)
        if formula is None:  # an operation that consists of others is counted by its parts
            with self:
                output = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        output = func(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=output)
        return output


def flops(
    model: nn.Module, image_shape: tuple[int, int, int], device: torch.device | str = "cpu"
) -> int:
    """Operations of convolutions and matrix products for one image; what runs outside of torch is
    not counted."""
    with inference(model), torch.no_grad(), _FlopCounter() as counter:
        model(torch.zeros(1, *image_shape, device=device))
    return int(counter.total)


def parameters(*modules: nn.Module) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def mean_passes(
    mixture: MixedClassifier,
    data: Dataset,
    device: torch.device | str = "cpu",
    batch_size: int = 128,
) -> tuple[float, float]:
    """Network passes of the robust model that `predict` makes per clean image, and the share of
    them that need g."""

    def count(rows: slice) -> tuple[float, int]:
        robust, accurate = mixture.passes(pixels(data.images[rows].to(device)))
        return float(robust.double().sum()), int(accurate.sum())

    with inference(mixture), torch.no_grad():
        parts = [part for _, part in memory.in_batches(count, len(data), batch_size)]
    robust, accurate = (sum(side) for side in zip(*parts, strict=True))
    return robust / len(data), accurate / len(data)


def accurate_share(
    mixture: MixedClassifier,
    data: Dataset,
    device: torch.device | str = "cpu",
    batch_size: int = 128,
) -> float:
    """The share of clean images on which `predict` has to run the accurate model."""
    return mean_passes(mixture, data, device, batch_size)[1]


def costs(
    mixture: MixedClassifier,
    data: Dataset,
    device: torch.device | str = "cpu",
    batch_size: int = 128,
) -> list[Cost]:
    """Both base models, the mixture that runs both, and the mixture that runs the robust model
    first (:meth:`~equipoise.mixing.MixedClassifier.predict`), as in [Bai2024nuts, Table 5].

    A network that selects alpha is part of both mixtures; it runs where the accurate model does. A
    robust model with several views costs all of them; the second mixture counts those that it runs.
    """
    mixture = mixture.to(device)
    g, h = (
        Cost(
            model=name,
            parameters=parameters(base) or None,
            flops=flops(base, data.image_shape, device) or None,
        )
        for name, base in (("accurate", mixture.accurate), ("robust", mixture.robust))
    )
    passes, share = mean_passes(mixture, data, device, batch_size)
    both = None if g.parameters is None or h.parameters is None else parameters(mixture)
    total = gated = None
    if g.flops is not None and h.flops is not None:
        total = flops(mixture, data.image_shape, device)
        gated = h.flops * passes / mixture.views + share * (total - h.flops)
    return [
        g,
        h,
        Cost(model="mixed", parameters=both, flops=total),
        Cost(
            model="mixed, gated",
            parameters=both,
            flops=gated,
            accurate_share=share,
            robust_passes=passes if mixture.views > 1 else None,
        ),
    ]
