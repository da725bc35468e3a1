"""Test-time augmentation as a model: the mean over shifted and mirrored copies of an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.models.inspection import Described

# Shifts down and right, in pixels; every set is balanced around the image.
SHIFTS = {
    2: ((0, 0),),
    6: ((2, 0), (-1, 2), (-1, -2)),
    10: ((0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)),
}


class TTAClassifier(Described):
    """The mean of a model's logits over `count` copies of an image, shifted by a pixel or two and
    mirrored.

    For models that were trained with random crops and flips. An adversary has to mislead all copies
    with one perturbation, so a robust model loses fewer images; the cost is `count` forward passes.
    `count` is 2 (the image and its mirror image), 6 or 10. Pixels shifted in from outside are
    black.
    """

    description = ("tta", "count")

    def __init__(self, model: nn.Module, count: int = 2) -> None:
        super().__init__()
        self.model = model
        checks.require(count in SHIFTS, "count", f"be one of {', '.join(map(str, SHIFTS))}", count)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        copies = torch.cat([shift(x, *by) for by in SHIFTS[self.count]])
        logits: Tensor = self.model(torch.cat([copies, copies.flip(3)]))
        return logits.view(self.count, x.shape[0], -1).mean(dim=0)

    def first_view(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits for the first copy alone: one pass."""
        logits: Tensor = self.model(shift(x, *SHIFTS[self.count][0]))
        return logits

    def complete(self, x: Tensor, first: Tensor) -> Tensor:
        """(B, K) the mean over all copies, given the logits of :meth:`first_view`: count − 1
        passes."""
        shifts = SHIFTS[self.count]
        mirrored = torch.cat([shift(x, *by) for by in shifts]).flip(3)
        others: Tensor = self.model(torch.cat([*(shift(x, *by) for by in shifts[1:]), mirrored]))
        return (first + others.view(self.count - 1, x.shape[0], -1).sum(dim=0)) / self.count


def shift(x: Tensor, down: int, right: int) -> Tensor:
    """Move images by whole pixels and fill with black."""
    return F.pad(x, (right, -right, down, -down))
