"""Residual networks of DeepMind's adversarial training and of its successors [Gowal2020,
Rebuffi2021, Peng2023].

They are the pre-activation networks of `resnet.py` but for SiLU (called Swish there) and for the
padding of strided convolutions, which TensorFlow calls "same": for even sizes one row and column of
zeros at the far end only.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.architectures.resnet import PreActResNet


def pad_same(x: Tensor, stride: int) -> Tensor:
    """Zeros around the image for a 3×3 convolution; before an even side that a stride of 2 halves
    there are none."""
    left, top = (1 if stride == 1 or side % 2 else 0 for side in (x.shape[3], x.shape[2]))
    return F.pad(x, (left, 1, top, 1))


class SqueezeExcitation(nn.Module):
    """Channels scaled by sigmoid(W₂·relu(W₁·mean)), where the mean is over the image and W₁ reduces
    the channels."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) → the same shape."""
        scale: Tensor = self.fc2(F.relu(self.fc1(x.mean(dim=(2, 3), keepdim=True)))).sigmoid()
        return scale * x


class SwishBlock(nn.Module):
    """x' + E(conv(silu(bn(conv(a))))) with a = silu(bn(x)); x' is x, or a 1×1 projection of a.

    Args:
        inputs, outputs, stride: of the block.
        excitation: E is a squeeze and excitation that keeps this share of the channels; None for
            the identity.
        raw_shortcut: the projection is a 3×3 convolution of x itself, also where only the image
            becomes smaller.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        excitation: float | None = None,
        raw_shortcut: bool = False,
    ) -> None:
        super().__init__()
        self.stride, self.raw_shortcut = stride, raw_shortcut
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.se = (
            None if excitation is None else SqueezeExcitation(outputs, round(excitation * outputs))
        )
        self.downsample: nn.Module | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Conv2d(
                inputs, outputs, 3 if raw_shortcut else 1, stride, bias=False
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        active = F.silu(self.bn1(x))
        out = self.conv2(F.silu(self.bn2(self.conv1(pad_same(active, self.stride)))))
        out = out if self.se is None else self.se(out)
        shortcut = (
            x
            if self.downsample is None
            else self.downsample(pad_same(x, self.stride) if self.raw_shortcut else active)
        )
        total: Tensor = out + shortcut
        return total


swish_resnet = partial(PreActResNet, block=SwishBlock, activation=F.silu)


def deepmind_wide_resnet(depth: int, width: int) -> partial[PreActResNet]:
    """WRN-depth-width with SiLU [Gowal2020]: depth = 6n + 4 gives n blocks per stage."""
    return partial(swish_resnet, 16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6)


# The "robust architecture" that [Peng2023] found: other depths and widths per stage, and squeeze
# and excitation.
robust_wide_resnet70_16 = partial(
    swish_resnet, 96, (216, 432, 864), (30, 31, 10), block=partial(SwishBlock, excitation=0.25)
)
deepmind_preact_resnet18 = partial(
    swish_resnet, 64, (64, 128, 256, 512), 2, block=partial(SwishBlock, raw_shortcut=True)
)
