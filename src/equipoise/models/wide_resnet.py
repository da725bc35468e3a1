"""Wide residual networks [Zagoruyko2016]: three stages of pre-activation blocks, `width` times as wide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from equipoise.models.preact_resnet import PreActResNet


class WideResNet(PreActResNet):
    """WRN-depth-width, with depth = 6n + 4: n blocks a stage, 16·width, 32·width and 64·width channels."""

    def __init__(
        self, depth: int, width: int, *, num_classes: int, image_shape: tuple[int, int, int],
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6,
            num_classes=num_classes, image_shape=image_shape, mean=mean, std=std,
        )


wide_resnet28_10 = partial(WideResNet, 28, 10)
wide_resnet34_10 = partial(WideResNet, 34, 10)
wide_resnet70_16 = partial(WideResNet, 70, 16)
