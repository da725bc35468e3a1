"""The networks of an attack, prepared for its many passes: each copy is made once, when it is first
needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from equipoise.attacks.conv_relu import fuse_activations_if
from equipoise.attacks.fused import agree, fuse
from equipoise.core import checks, device

EXAMPLES = 8  # images on which copies and precisions are compared with the model
TOLERANCES = {
    torch.bfloat16: 0.05,
    torch.float16: 0.005,
}  # of copies in reduced precision, as parts of the spread
T = TypeVar("T")


class PreparedNetworks:
    """Faster copies of networks in inference mode, whose weights do not change while this object is
    used.

    Whoever runs attacks makes one and drops it with them: attacks that differ in their surrogate
    share the copies of the model, and those on one mixture the copies of its bases.

    Args:
        precision: fp32, bf16 (for gradients), or auto: bf16 on CUDA.
        example: some of the images, on which copies and precisions are tried.
    """

    def __init__(self, precision: str, example: Tensor) -> None:
        self.precision, self.example = (
            device.check_precision(precision, example.device),
            example[:EXAMPLES],
        )
        self._kept: dict[tuple[object, ...], tuple[nn.Module, object]] = {}

    def once(self, network: nn.Module, purpose: object, make: Callable[[], T]) -> T:
        """What `make` returns for this network and purpose, kept with the network."""
        key = (id(network), purpose)
        if key not in self._kept:
            self._kept[key] = (
                network,
                make(),
            )  # holding the network keeps its id from being used again
        return self._kept[key][1]  # type: ignore[return-value]

    def logits(self, network: nn.Module, noun: str = "model") -> Tensor:
        """(B, K) logits of the examples in full precision; an error that names the network unless
        they are logits."""

        @torch.no_grad()
        def compute() -> Tensor:
            with device.full_precision(self.example.device):
                return checks.logits(
                    network(self.example),
                    len(self.example),
                    f"logits of the {noun} {type(network).__name__}",
                )

        return self.once(network, "logits", compute)

    def fused(self, network: nn.Module, classes: int) -> nn.Module:
        """The network with folded batch norms and a last layer of so many `classes` in full
        precision, or itself."""
        if self.example.dtype != torch.float32:
            return network
        return self.once(
            network, ("fused", classes), lambda: fuse(network, self.example, [classes])
        )

    def reduced(self, network: nn.Module, classes: int, dtype: torch.dtype) -> nn.Module | None:
        """A copy that has the network's logits under autocast to `dtype`; None if there is none or
        it is not wanted.

        On a CPU bf16 must be asked for; fp16 is for CUDA.
        """
        place = self.example.device.type
        wanted = self.precision == "bf16" or (self.precision == "auto" and place == "cuda")
        if (
            not wanted
            or self.example.dtype != torch.float32
            or (dtype == torch.float16 and place != "cuda")
        ):
            return None
        return self.once(network, (dtype, classes), lambda: self._reduce(network, classes, dtype))

    @torch.no_grad()
    def _reduce(self, network: nn.Module, classes: int, dtype: torch.dtype) -> nn.Module | None:
        place, logits, copy = (
            self.example.device.type,
            self.logits(network),
            self.fused(network, classes),
        )

        def agrees(candidate: nn.Module) -> bool:
            columns = getattr(network, "columns", None)
            return agree(candidate(self.example).float(), logits, TOLERANCES[dtype], columns)

        with torch.autocast(place, dtype=dtype, cache_enabled=False):
            fused = fuse_activations_if(agrees, copy, dtype) if place == "cuda" else None
            return fused if fused is not None else copy if agrees(copy) else None
