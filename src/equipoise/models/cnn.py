"""A small convolutional network that learns 8×8 digits in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.normalize import Normalized


class CNN(Normalized):
    """3×3 convolutions of strides 1, 2, 2 with `width`, 2·`width`, 4·`width` channels, and a linear layer.

    Without batch norm, so that a prediction is the same function of its image in both modes.

    Args:
        width: channels of the first convolution.
        num_classes: K.
        image_shape: (C, H, W), of any size.
        mean, std: of the images, per channel.
    """

    def __init__(
        self, width: int, *, num_classes: int, image_shape: tuple[int, int, int],
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    ) -> None:
        channels, high, wide = image_shape
        super().__init__(channels, mean, std)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        # Two strides of 2 with padding leave ⌈side / 4⌉ pixels.
        self.fc = nn.Linear(4 * width * -(-high // 4) * -(-wide // 4), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        out = F.relu(self.conv1(self.normalize(x)))
        out = F.relu(self.conv3(F.relu(self.conv2(out))))
        if out.device.type == "cpu":
            # The last layer as a convolution: on the CPU a matrix product this long sums in an order that depends on
            # the size of the batch, and a network that answers alike in any company is attacked several times faster.
            return F.conv2d(out, self.fc.weight.view(-1, *out.shape[1:]), self.fc.bias).flatten(1)
        logits: Tensor = self.fc(out.flatten(1))
        return logits


cnn_small = partial(CNN, 16)
cnn = partial(CNN, 32)
