"""Residual networks for small images [He2016]: a 3×3 stem, no max-pool, torchvision's key names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.normalize import Normalized


def he_init(module: nn.Module) -> None:
    """Convolutions from N(0, 2 / fan-out) [He2015]; everything else keeps torch's own start."""
    for sub in module.modules():
        if isinstance(sub, nn.Conv2d):
            nn.init.kaiming_normal_(sub.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """relu(x' + bn(conv(relu(bn(conv(x)))))), where x' is x, or its 1×1 projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(Normalized):
    """Stages `layer1`, `layer2`, … of basic blocks; every stage but the first halves the image.

    Args:
        widths: channels of each stage; the stem has the first.
        blocks: basic blocks of each stage.
        num_classes: K.
        image_shape: (C, H, W); only C shapes the weights.
        mean, std: of the images, per channel.
    """

    def __init__(
        self, widths: Sequence[int], blocks: int, *, num_classes: int, image_shape: tuple[int, int, int],
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    ) -> None:
        super().__init__(image_shape[0], mean, std)
        self.conv1 = nn.Conv2d(image_shape[0], widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        inputs = widths[0]
        for name, outputs in zip(self.stages, widths, strict=True):
            stride = 1 if name == "layer1" else 2
            first = BasicBlock(inputs, outputs, stride)
            self.add_module(name, nn.Sequential(
                first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1))
            ))
            inputs = outputs
        self.fc = nn.Linear(inputs, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        out = F.relu(self.bn1(self.conv1(self.normalize(x))))
        for name in self.stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


# 6n + 2 layers: three stages of n blocks of two convolutions, the stem and the last layer.
resnet8 = partial(ResNet, (16, 32, 64), 1)
resnet20 = partial(ResNet, (16, 32, 64), 3)
resnet110 = partial(ResNet, (16, 32, 64), 18)
resnet18 = partial(ResNet, (64, 128, 256, 512), 2)
