"""The architectures by name, with fresh weights that depend on a seed and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from equipoise.core import checks
from equipoise.models.cnn import cnn, cnn_small
from equipoise.models.lenet import LeNet
from equipoise.models.normalize import Normalized
from equipoise.models.preact_resnet import preact_resnet18
from equipoise.models.resnet import resnet8, resnet18, resnet20, resnet110
from equipoise.models.wide_resnet import wide_resnet28_10, wide_resnet34_10, wide_resnet70_16


class Builder(Protocol):
    """What makes an architecture for K classes and images of a shape; its last layer is called `fc`."""

    def __call__(
        self, *, num_classes: int, image_shape: tuple[int, int, int], mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Normalized:
        """The module, initialised from torch's default generator."""


ARCHITECTURES: dict[str, Builder] = {
    "cnn": cnn,
    "cnn_small": cnn_small,
    "lenet": LeNet,
    "preact_resnet18": preact_resnet18,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet110": resnet110,
    "wide_resnet28_10": wide_resnet28_10,
    "wide_resnet34_10": wide_resnet34_10,
    "wide_resnet70_16": wide_resnet70_16,
}


def build(
    arch: str, *, num_classes: int, image_shape: tuple[int, int, int], mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None, seed: int = 0,
) -> Normalized:
    """An architecture with fresh weights, in training mode, on the CPU.

    Args:
        arch: a name of `ARCHITECTURES`.
        num_classes: K ≥ 2.
        image_shape: (C, H, W).
        mean, std: of the images, per channel; 0 and 1 where left out.
        seed: the same seed gives the same weights; the global random state is left as it was.
    """
    checks.whole("seed", seed)
    checks.require(seed < 2**63, "seed", "be less than 2**63", seed)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the CUDA generators, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return _construct(arch, num_classes, image_shape, mean, std)


def blank(
    arch: str, *, num_classes: int, image_shape: tuple[int, int, int], mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Normalized:
    """The same architecture without weights (on torch's `meta` device): names and shapes at no cost."""
    with torch.device("meta"):
        return _construct(arch, num_classes, image_shape, mean, std)


def _construct(
    arch: str, num_classes: int, image_shape: tuple[int, int, int], mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Normalized:
    checks.one_of("arch", arch, ARCHITECTURES)
    checks.whole("num_classes", num_classes, least=2)
    sides = all(isinstance(side, int) and side >= 1 for side in image_shape)
    checks.require(len(image_shape) == 3 and sides, "image_shape", "be (C, H, W)", image_shape)
    model = ARCHITECTURES[arch](num_classes=num_classes, image_shape=image_shape, mean=mean, std=std)
    shape = ",".join(map(str, image_shape))
    model.identity = {"arch": arch, "num_classes": str(num_classes), "image_shape": shape}
    return model
