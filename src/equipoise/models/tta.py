"""A classifier that looks several times: at an image, a little moved, and at its mirror image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks

# Down and right, in pixels; every set is balanced around the image.
SHIFTS = {
    2: ((0, 0),),
    6: ((2, 0), (-1, 2), (-1, -2)),
    10: ((0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)),
}


class TTAClassifier(nn.Module):
    """The mean of a model's logits over several looks at an image: moved by a pixel or two, and mirrored.

    For models whose classes mind neither, which is what training with crops and flips says. An adversary has to
    mislead all looks with one perturbation, so a robust model loses fewer images; it costs as many passes.

    Args:
        model: images (B, C, H, W) → logits (B, K).
        count: 2 (the image and its mirror image), 6 or 10. What moves in from outside is black.
    """

    def __init__(self, model: nn.Module, count: int = 2) -> None:
        super().__init__()
        self.model = model
        checks.require(count in SHIFTS, "looks", f"be one of {', '.join(map(str, SHIFTS))}", count)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        moved = torch.cat([shifted(x, *by) for by in SHIFTS[self.count]])
        logits: Tensor = self.model(torch.cat([moved, moved.flip(3)]))
        return logits.view(self.count, x.shape[0], -1).mean(dim=0)

    def extra_repr(self) -> str:
        """How often."""
        return f"count={self.count}"


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Images moved by whole pixels; black comes in.

    >>> shifted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2), 1, 0)[0, 0]
    tensor([[0., 0.],
            [1., 2.]])
    """
    return F.pad(x, (right, -right, down, -down))
