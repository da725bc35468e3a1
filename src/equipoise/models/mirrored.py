"""A classifier that looks twice: at the image and at its mirror image."""

from __future__ import annotations

from torch import Tensor, nn


class Mirrored(nn.Module):
    """The mean of a model's logits on an image and on its mirror image (left and right exchanged).

    For models whose classes do not mind the mirror, which is what training with flips says. An adversary has to
    mislead both looks with one perturbation, so a robust model loses fewer images; it costs two passes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        looks: Tensor = self.model(x) + self.model(x.flip(3))
        return looks / 2
