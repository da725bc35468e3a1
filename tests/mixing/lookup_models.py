"""Models whose logits are looked up in a table by the number of the image, so that any logits can
be tested."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core.rng import stream


class LookupModel(nn.Module):
    """Image number i (its first pixel) gets row i of the table; counts the images it was run on."""

    rows: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.images_run = 0

    def forward(self, x: Tensor) -> Tensor:
        self.images_run += len(x)
        out: Tensor = self.rows[numbers_of(x)]
        return out


def numbered_images(count: int) -> Tensor:
    """Images in [0, 1] that hold their number as a multiple of 2⁻¹⁶."""
    return (torch.arange(count, dtype=torch.float32) / 2**16).view(-1, 1, 1, 1).expand(-1, 3, 5, 7)


def numbers_of(x: Tensor) -> Tensor:
    return (x[:, 0, 0, 0] * 2**16).long()


def lookup_pair(
    seed: int, scale: float, count: int = 40, classes: int = 6
) -> tuple[LookupModel, LookupModel]:
    """Coarse random logits, so that ties of classes and of margins happen."""
    random_stream = stream(seed, "tables", torch.arange(count))
    g, h = ((scale * random_stream.at(side).normal(classes)).round() / 2 for side in ("g", "h"))
    return LookupModel(g), LookupModel(h)
