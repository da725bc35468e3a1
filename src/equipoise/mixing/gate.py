"""The gate: a network that uses features of both bases to select an alpha for every image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.models import feature_hooks
from equipoise.models.architectures.resnet import PreActBlock, he_init
from equipoise.models.feature_hooks import FeatureLayers, FeatureMaps
from equipoise.models.inspection import Described

WIDTH = 96  # of the first stage; the official network has 256
PairOfLayers = tuple[
    FeatureLayers, FeatureLayers
]  # feature layers of the accurate and of the robust base


class Gate(Described):
    """The mixing network: one number per image from feature maps of two depths of both bases
    [Bai2024, Figure 10].

    Three stages of two pre-activation blocks, each halving the map: the first on the joined shallow
    maps; its output is added to the joined deep maps (through a 1×1 convolution where the channels
    differ, average-pooled where the sizes do); global average; a linear layer without bias; batch
    norm without a scale, so that the output cannot shrink or grow during training. The statistics
    are the batch's in training mode and running ones otherwise; nothing else depends on the mode.

    Args:
        feature_layers: the submodules of both bases whose outputs it gets.
        shallow, deep: channels of the joined maps of both bases.
        width: channels of the first stage; the next have twice and four times as many.
        momentum: of the running statistics of the output.
    """

    description = ("gate", "feature_layers", "shape")

    def __init__(
        self,
        feature_layers: PairOfLayers,
        shallow: int,
        deep: int,
        width: int = WIDTH,
        momentum: float = 0.05,
    ) -> None:
        super().__init__()
        self.feature_layers = feature_layers
        self.shape = (shallow, deep, checks.whole("width", width, least=1, most=4096))
        self.first = _stage(shallow, width)
        self.join: nn.Module = (
            nn.Identity() if deep == width else nn.Conv2d(deep, width, 1, bias=False)
        )
        self.second = _stage(width, 2 * width)
        self.third = _stage(2 * width, 4 * width)
        self.fc = nn.Linear(4 * width, 1, bias=False)
        self.output = nn.BatchNorm1d(1, affine=False, momentum=momentum)
        he_init(self)

    def forward(self, features: Sequence[FeatureMaps]) -> Tensor:
        """(B,) from the maps of the accurate and of the robust base; about standard normal on
        training images."""
        shallow, deep = feature_hooks.join_features(features)
        checks.require(
            (shallow.shape[1], deep.shape[1]) == self.shape[:2],
            "bases",
            "be those of the gate, with "
            f"{self.shape[0]} and {self.shape[1]} channels at its feature layers",
            (shallow.shape[1], deep.shape[1]),
        )
        matched = feature_hooks.match_sizes([self.first(shallow), self.join(deep)])
        last = self.third(self.second(matched[0] + matched[1])).mean(dim=(2, 3))
        # In bfloat16 this one number would hide from an attack what it gains by changing it.
        with torch.autocast(last.device.type, enabled=False):
            output: Tensor = self.output(self.fc(last.to(self.fc.weight.dtype)))
        return output.squeeze(1)


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, outputs, 2), PreActBlock(outputs, outputs, 1))


def new_gate(
    accurate: nn.Module,
    robust: nn.Module,
    example: Tensor,
    *,
    feature_layers: PairOfLayers | None = None,
    width: int = WIDTH,
    momentum: float = 0.05,
    seed: int = 0,
) -> Gate:
    """A gate with random weights for two bases.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        example: a few images, to find the channels of the feature maps.
        feature_layers: two submodule names per base, found if not given.
        width, momentum: of the :class:`Gate`.
        seed: the same seed gives the same weights.
    """
    layers = feature_layers
    valid = layers is None or [
        len(names) if isinstance(names, tuple | list) else 0 for names in layers
    ] == [2, 2]
    checks.require(
        valid,
        "feature_layers",
        "hold two names for the accurate and two for the robust base",
        layers,
    )
    with torch.no_grad(), inference(accurate, robust):
        layers = layers or (
            feature_hooks.find_feature_layers(accurate, example),
            feature_hooks.find_feature_layers(robust, example),
        )
        shallow, deep = feature_hooks.joined_channels((accurate, robust), layers, example)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Gate(layers, shallow, deep, width, momentum)
