"""Models that compute outside of torch: their outputs have no gradients, and attacks on them search
at random."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.models.inspection import Described
from equipoise.models.layers.resizing import Preprocessing

CHANNELS = (1, 3, 4)  # what the last axis of NHWC images may have
SMALLEST = 1e-30  # probability: its logarithm is finite


@dataclass(frozen=True)
class ImageInput:
    """The input of a graph: its name, whether channels come last, the fixed batch, (C, H, W) with
    None for any."""

    name: str
    channels_last: bool
    batch: int | None
    shape: tuple[int | None, int | None, int | None]
    is_bytes: bool

    @classmethod
    def of(cls, name: str, sizes: Sequence[int | None], *, is_bytes: bool) -> Self:
        """The input of these four sizes; channels come last where only the last size can be their
        number."""
        last = sizes[3] in CHANNELS and sizes[1] not in CHANNELS
        shape = (sizes[3], sizes[1], sizes[2]) if last else (sizes[1], sizes[2], sizes[3])
        return cls(name, last, sizes[0], shape, is_bytes)

    @property
    def known_shape(self) -> tuple[int, int, int] | None:
        """(C, H, W), if all are fixed."""
        channels, height, width = self.shape
        return (
            None
            if channels is None or height is None or width is None
            else (channels, height, width)
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """What images in [0, 1] need: a factor of 255 for bytes."""
        scale = (1 / 255,) * (self.shape[0] or 3) if self.is_bytes else None
        return Preprocessing(std=scale, origin="for bytes" if scale else "")

    def arrange(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) as the graph takes them; those for bytes are 0 … 255 already."""
        x = x.round().clamp(0, 255).to(torch.uint8) if self.is_bytes else x
        return x.permute(0, 2, 3, 1).contiguous() if self.channels_last else x

    def chunks(self, x: Tensor) -> list[Tensor]:
        """The images in batches of the fixed size, the last one filled up with its last image."""
        if self.batch is None or len(x) == 0:
            return [x]
        parts = list(x.split(self.batch))
        missing = self.batch - len(parts[-1])
        parts[-1] = torch.cat([parts[-1], parts[-1][-1:].expand(missing, *x.shape[1:])])
        return parts


class BlackBox(Described, ABC):
    """Base class: (B, C, H, W) images in [0, 1] → (B, K) scores, or (B,) classes, by :meth:`query`.

    Args:
        num_classes: K, to write classes as scores, 1 for the class and 0 for the others.
        digest: SHA-256 of what computes, as a buffer: a mixture notices if it changes.
        probabilities: the scores are probabilities; their logarithms are returned.
    """

    has_gradients = False

    def __init__(
        self, num_classes: int | None, digest: bytes, *, probabilities: bool = False
    ) -> None:
        super().__init__()
        self.num_classes, self.probabilities = num_classes, probabilities
        self.register_buffer("digest", torch.tensor(list(digest), dtype=torch.uint8))

    @abstractmethod
    def query(self, x: Tensor) -> Tensor:
        """Scores (B, K) or classes (B,) for images on the CPU, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits without a gradient."""
        if torch._C._get_tracing_state():
            raise RuntimeError("a trace would keep the answers to its example")
        output = self.query(x.detach().float().cpu())
        if not output.is_floating_point() and output.numel() == len(x):
            output = output.flatten()
            checks.require(
                self.num_classes is not None,
                "num_classes",
                "be given (?num_classes=10) for a model that returns classes alone",
                None,
            )
            classes = checks.labels(
                output.long(), self.num_classes or 0, len(x), "classes of the model"
            )
            output = torch.zeros(len(x), self.num_classes or 0).scatter(
                1, classes.unsqueeze(1), 1.0
            )
        checks.require(
            output.dim() == 2 and output.shape[1] >= 2,
            "model",
            "return scores of at least two classes",
            f"shape {tuple(output.shape)}",
        )
        if self.probabilities:
            output = output.float().clamp_min(SMALLEST).log()
        return output.to(x.device, x.dtype)


def has_gradients(model: nn.Module) -> bool:
    """Whether gradients reach the images: no part of the model computes outside of torch."""
    return all(getattr(part, "has_gradients", True) for part in model.modules())
