"""Residual networks for small images (3×3 stem, no max-pool): ResNet, pre-activation ResNet and
Wide ResNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.layers.normalization import Normalized


def he_init(module: nn.Module) -> None:
    """Initialise convolutions from N(0, 2 / fan-out) [He2015]; everything else keeps torch's
    default."""
    for sub in module.modules():
        # For weights without memory torch would import its compiler, which takes seconds.
        if isinstance(sub, nn.Conv2d) and not sub.weight.is_meta:
            nn.init.kaiming_normal_(sub.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """relu(x' + bn(conv(relu(bn(conv(x)))))), where x' is x, or its 1×1 projection if the shape
    changes."""

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


class Bottleneck(nn.Module):
    """The block of three convolutions of ResNet-50 [He2016], whose stride lies in the middle
    one."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class PreActBlock(nn.Module):
    """x' + conv(relu(bn(conv(a)))) with a = relu(bn(x)) [He2016identity]; x' is x, or a 1×1
    projection of a.

    With `raw_shortcut` the projection is that of x itself, as in some published checkpoints.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, raw_shortcut: bool = False
    ) -> None:
        super().__init__()
        self.raw_shortcut = raw_shortcut
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
        shortcut = (
            x if self.downsample is None else self.downsample(x if self.raw_shortcut else active)
        )
        total: Tensor = out + shortcut
        return total


def add_stages(
    model: nn.Module,
    block: Callable[[int, int, int], nn.Module],
    inputs: int,
    widths: Sequence[int],
    blocks: int | Sequence[int],
) -> list[str]:
    """Add submodules `layer1`, `layer2`, … of so many blocks each; every stage but the first halves
    the image."""
    names = [f"layer{number}" for number in range(1, len(widths) + 1)]
    counts = [blocks] * len(widths) if isinstance(blocks, int) else blocks
    for name, outputs, count in zip(names, widths, counts, strict=True):
        first = block(inputs, outputs, 1 if name == "layer1" else 2)
        model.add_module(
            name, nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(count - 1)))
        )
        inputs = outputs
    return names


class ResNet(Normalized):
    """ResNet [He2016]: stages of `blocks` blocks with `widths` channels; torchvision's key names.

    The stem has as many channels as the first stage, or `stem`.
    """

    def __init__(
        self,
        widths: Sequence[int],
        blocks: int | Sequence[int],
        *,
        num_classes: int,
        image_shape: tuple[int, int, int],
        block: Callable[[int, int, int], nn.Module] = BasicBlock,
        stem: int | None = None,
    ) -> None:
        super().__init__(image_shape[0])
        stem = widths[0] if stem is None else stem
        self.conv1 = nn.Conv2d(image_shape[0], stem, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.stages = add_stages(self, block, stem, widths, blocks)
        self.fc = nn.Linear(widths[-1], num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        out = F.relu(self.bn1(self.conv1(self.normalize(x))))
        for name in self.stages:
            out = self.get_submodule(name)(out)
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


class PreActResNet(Normalized):
    """Pre-activation ResNet [He2016identity]: a 3×3 stem, stages of pre-activation blocks and a
    linear layer on the mean over the image.

    Args:
        stem: channels of the stem.
        widths, blocks: channels and number of blocks of each stage.
        num_classes, image_shape: K, and (C, H, W).
        block: of its inputs, outputs and stride.
        activation: after the last block, behind a batch norm; None for neither, as in some
            published checkpoints.
    """

    def __init__(
        self,
        stem: int,
        widths: Sequence[int],
        blocks: int | Sequence[int],
        *,
        num_classes: int,
        image_shape: tuple[int, int, int],
        block: Callable[[int, int, int], nn.Module] = PreActBlock,
        activation: Callable[[Tensor], Tensor] | None = F.relu,
    ) -> None:
        super().__init__(image_shape[0])
        self.activation = activation
        self.conv1 = nn.Conv2d(image_shape[0], stem, 3, padding=1, bias=False)
        self.stages = add_stages(self, block, stem, widths, blocks)
        self.bn = None if activation is None else nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, K) logits."""
        out = self.conv1(self.normalize(x))
        for name in self.stages:
            out = self.get_submodule(name)(out)
        if self.bn is not None and self.activation is not None:
            out = self.activation(self.bn(out))
        logits: Tensor = self.fc(out.mean(dim=(2, 3)))
        return logits


def wide_resnet(depth: int, width: int) -> partial[PreActResNet]:
    """WRN-depth-width [Zagoruyko2016]: depth = 6n + 4 gives n blocks per stage, `width` times 16,
    32, 64 channels."""
    return partial(PreActResNet, 16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6)


# A variant in some published checkpoints: projections of the input itself, nothing after the last
# block.
raw_preact_resnet18 = partial(
    PreActResNet,
    64,
    (64, 128, 256, 512),
    2,
    block=partial(PreActBlock, raw_shortcut=True),
    activation=None,
)
