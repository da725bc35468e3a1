"""Residual networks that normalise before they convolve [He2016identity]; wide ones are built of them too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.normalize import Normalized
from equipoise.models.resnet import he_init


class PreActBlock(nn.Module):
    """x' + conv(relu(bn(conv(a)))) with a = relu(bn(x)); x' is x, or a 1×1 projection of a."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        active = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        total: Tensor = out + (x if self.downsample is None else self.downsample(active))
        return total


class PreActResNet(Normalized):
    """Stages `layer1`, `layer2`, … of pre-activation blocks and a last batch norm `bn`.

    Args:
        stem: channels of the first convolution.
        widths: channels of each stage; every stage but the first halves the image.
        blocks: blocks of each stage.
        num_classes: K.
        image_shape: (C, H, W); only C shapes the weights.
        mean, std: of the images, per channel.
    """

    def __init__(
        self, stem: int, widths: Sequence[int], blocks: int, *, num_classes: int,
        image_shape: tuple[int, int, int], mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__(image_shape[0], mean, std)
        self.conv1 = nn.Conv2d(image_shape[0], stem, 3, padding=1, bias=False)
        self.stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        inputs = stem
        for name, outputs in zip(self.stages, widths, strict=True):
            stride = 1 if name == "layer1" else 2
            first = PreActBlock(inputs, outputs, stride)
            self.add_module(name, nn.Sequential(
                first, *(PreActBlock(outputs, outputs, 1) for _ in range(blocks - 1))
            ))
            inputs = outputs
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        out = self.conv1(self.normalize(x))
        for name in self.stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.fc(F.relu(self.bn(out)).mean(dim=(2, 3)))
        return logits


preact_resnet18 = partial(PreActResNet, 64, (64, 128, 256, 512), 2)
