"""What a prediction costs: parameters and floating-point operations, of both bases and of the mixture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise.core import memory
from equipoise.core.modes import inference
from equipoise.data import Dataset, pixels
from equipoise.mixing import MixedClassifier


@dataclass(frozen=True)
class Cost:
    """Of one prediction; a multiplication with its addition counts as two operations.

    None is not known: a model that computes outside of torch shows neither its parameters nor its operations.
    """

    model: str
    parameters: int | None
    flops: float | None
    asked: float | None = None  # share of the images on which the accurate side had to run

    def facts(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def flops(model: nn.Module, image_shape: tuple[int, int, int], device: torch.device | str = "cpu") -> int:
    """Operations of convolutions and matrix products for one image; what lies outside of torch is not seen."""
    counter = FlopCounterMode(display=False)
    with inference(model), torch.no_grad(), counter:
        model(torch.zeros(1, *image_shape, device=device))
    return int(counter.get_total_flops())


def parameters(*modules: nn.Module) -> int:
    """Numbers that were learnt, each counted once even if shared."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def asked(mixture: MixedClassifier, data: Dataset, device: torch.device | str = "cpu", batch_size: int = 128) -> float:
    """The share of clean images on which gated prediction has to run the accurate side."""

    def count(rows: slice) -> int:
        x = pixels(data.images[rows].to(device))
        return int(mixture.undecided(mixture.mapped(mixture.robust(x))).sum())

    with inference(mixture), torch.no_grad():
        return sum(n for _, n in memory.in_batches(count, len(data), batch_size)) / len(data)


def costs(mixture: MixedClassifier, data: Dataset, device: torch.device | str = "cpu",
          batch_size: int = 128) -> list[Cost]:
    """Both bases, the mixture that runs both, and the mixture that runs the robust side first
    (:meth:`~equipoise.mixing.MixedClassifier.predict`), as in [Bai2024nuts, Table 5]."""
    g, h = (_seen(name, base, data, device) for name, base in (("accurate", mixture.accurate),
                                                               ("robust", mixture.robust)))
    share = asked(mixture, data, device, batch_size)
    both = None if g.parameters is None or h.parameters is None else parameters(mixture)
    whole = gated = None
    if g.flops is not None and h.flops is not None:
        whole, gated = g.flops + h.flops, h.flops + share * g.flops
    return [g, h, Cost("mixed", both, whole), Cost("mixed, gated", both, gated, share)]


def _seen(name: str, base: nn.Module, data: Dataset, device: torch.device | str) -> Cost:
    learnt, work = parameters(base), flops(base, data.image_shape, device)
    return Cost(name, learnt or None, work or None)
