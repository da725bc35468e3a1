"""LeNet for digits [LeCun1998], in the width common today: 20 and 50 channels, 500 hidden units."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.models.normalize import Normalized


class LeNet(Normalized):
    """Two 5×5 convolutions, each halved by a max-pool, and two linear layers.

    Args:
        num_classes: K.
        image_shape: (C, H, W) with H, W ≥ 16; (1, 28, 28) gives 4·4·50 = 800 features.
        mean, std: of the images, per channel.
    """

    def __init__(
        self, *, num_classes: int, image_shape: tuple[int, int, int],
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    ) -> None:
        channels, height, width = image_shape
        checks.require(min(height, width) >= 16, "image_shape", "be at least 16 by 16 for lenet", image_shape)
        super().__init__(channels, mean, std)
        self.conv1 = Patches(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * _left(height) * _left(width), 500)
        self.fc = nn.Linear(500, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        # Pooled before the ReLU: the same numbers from a quarter of the work.
        out = F.relu(F.max_pool2d(self.conv1(self.normalize(x)), 2))
        out = F.relu(F.max_pool2d(self.conv2(out), 2))
        logits: Tensor = self.fc(F.relu(self.fc1(out.flatten(1))))
        return logits


class Patches(nn.Conv2d):
    """A convolution of stride 1 without padding, as one product over patches.

    Where an image has one channel, libraries of convolutions are slow, backwards above all: see docs/benchmarks.md.
    """

    def __init__(self, channels: int, made: int, kernel: int | tuple[int, int]) -> None:
        super().__init__(channels, made, kernel)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C', H', W')."""
        height, width = self.kernel_size
        patches = x.unfold(2, height, 1).unfold(3, width, 1).movedim(1, 3).flatten(3)  # (B, H', W', C·h·w)
        return F.linear(patches, self.weight.flatten(1), self.bias).movedim(3, 1)


def _left(side: int) -> int:
    """Pixels of a side after both convolutions and pools."""
    return ((side - 4) // 2 - 4) // 2
