"""Big Transfer (BiT) ResNet [Kolesnikov2020]: the accurate model of MixedNUTS on CIFAR
[Bai2024nuts]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.architectures.resnet import add_stages
from equipoise.models.layers.normalization import Normalized

SIDE = 128  # images are enlarged to this size
GROUPS = 32  # of group normalisation


class StandardizedConv2d(nn.Conv2d):
    """A convolution without bias whose filters have mean 0 and variance 1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, …)."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(
            x, (self.weight - mean) / torch.sqrt(variance + 1e-10), None, self.stride, self.padding
        )


class GroupNormBottleneck(nn.Module):
    """Pre-activation bottleneck with group normalisation; x' is x, or a 1×1 projection of the
    activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.gn1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = StandardizedConv2d(inputs, width, 1)
        self.gn2 = nn.GroupNorm(GROUPS, width)
        self.conv2 = StandardizedConv2d(width, width, 3, stride)
        self.gn3 = nn.GroupNorm(GROUPS, width)
        self.conv3 = StandardizedConv2d(width, outputs, 1)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = StandardizedConv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        active = F.relu(self.gn1(x))
        out = self.conv2(F.relu(self.gn2(self.conv1(active))))
        out = self.conv3(F.relu(self.gn3(out)))
        total: Tensor = out + (x if self.downsample is None else self.downsample(active))
        return total


class BiTResNet(Normalized):
    """Images are enlarged to :data:`SIDE` pixels, as in fine-tuning on small images, before they
    are normalised."""

    def __init__(
        self,
        width: int,
        blocks: Sequence[int],
        *,
        num_classes: int,
        image_shape: tuple[int, int, int],
    ) -> None:
        super().__init__(image_shape[0])
        self.conv1 = StandardizedConv2d(image_shape[0], 64 * width, 7, 2)
        widths = [side * width for side in (256, 512, 1024, 2048)]
        self.stages = add_stages(self, GroupNormBottleneck, 64 * width, widths, blocks)
        self.gn = nn.GroupNorm(GROUPS, widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        enlarged = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear")
        out = self.conv1(self.normalize(enlarged))
        out = F.max_pool2d(
            F.pad(out, (1, 1, 1, 1)), 3, 2
        )  # padded by zeros, which can be the largest value
        for name in self.stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.fc(F.relu(self.gn(out)).mean(dim=(2, 3)))
        return logits


bit_resnet152x2 = partial(BiTResNet, 2, (3, 8, 36, 3))
