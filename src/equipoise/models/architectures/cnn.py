"""Small convolutional networks: a CNN that learns 8×8 digits in seconds, and LeNet."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.models.layers.normalization import Normalized


class CNN(Normalized):
    """3×3 convolutions of strides 1, 2, 2 with `width`, 2·`width`, 4·`width` channels, and a linear
    layer.

    Without batch norm, so that training and evaluation mode are the same function. Images may be of
    any size.
    """

    def __init__(self, width: int, *, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        channels, high, wide = image_shape
        super().__init__(channels)
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
            # The last layer as a convolution: on the CPU the summation order of a matrix product
            # this long depends on the batch size, and rows of results should not.
            return F.conv2d(out, self.fc.weight.view(-1, *out.shape[1:]), self.fc.bias).flatten(1)
        logits: Tensor = self.fc(out.flatten(1))
        return logits


class LeNet(Normalized):
    """LeNet [LeCun1998] in today's common width: 20 and 50 channels, 500 hidden units; images of at
    least 16 × 16."""

    def __init__(self, *, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        channels, *sides = image_shape
        checks.require(
            min(sides) >= 16, "image_shape", "be at least 16 by 16 for lenet", image_shape
        )
        super().__init__(channels)
        # Each 5×5 convolution takes away four pixels of a side, each max-pool halves it.
        high, wide = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.conv1 = PatchConv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * high * wide, 500)
        self.fc = nn.Linear(500, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        # Max-pool before ReLU gives the same numbers as after it, and costs less.
        out = F.relu(F.max_pool2d(self.conv1(self.normalize(x)), 2))
        out = F.relu(F.max_pool2d(self.conv2(out), 2))
        logits: Tensor = self.fc(F.relu(self.fc1(out.flatten(1))))
        return logits


class PatchConv2d(nn.Conv2d):
    """A convolution of stride 1 without padding, computed as one matrix product over patches.

    Convolution kernels are slow for images of one channel, above all in the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C', H', W')."""
        height, width = self.kernel_size
        patches = (
            x.unfold(2, height, 1).unfold(3, width, 1).movedim(1, 3).flatten(3)
        )  # (B, H', W', C·h·w)
        return F.linear(patches, self.weight.flatten(1), self.bias).movedim(3, 1)
