"""Architectures by name, and how to build them with random weights that depend on a seed only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from equipoise.core import checks
from equipoise.core.registry import Registry
from equipoise.models.architectures.bit_resnet import bit_resnet152x2
from equipoise.models.architectures.cnn import CNN, LeNet
from equipoise.models.architectures.deepmind_resnet import (
    deepmind_preact_resnet18,
    deepmind_wide_resnet,
    robust_wide_resnet70_16,
)
from equipoise.models.architectures.resnet import (
    Bottleneck,
    PreActResNet,
    ResNet,
    raw_preact_resnet18,
    wide_resnet,
)
from equipoise.models.layers.normalization import Normalized

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference

MAX_SIDE = (
    2**14
)  # of images: the metadata of a file may name any number, and torch overflows at very large ones


class Builder(Protocol):
    """Builds an architecture; its last layer is called `fc`."""

    def __call__(self, *, num_classes: int, image_shape: tuple[int, int, int]) -> Normalized:
        """The module for K classes and images (C, H, W), initialised from torch's default
        generator."""


ARCHITECTURES: Registry[Builder] = Registry(
    "equipoise.architectures",
    "arch",
    {
        "bit_resnet152x2": bit_resnet152x2,
        "cnn": partial(CNN, 32),
        "cnn_small": partial(CNN, 16),
        "deepmind_preact_resnet18": deepmind_preact_resnet18,
        **{
            f"deepmind_wide_resnet{depth}_{width}": deepmind_wide_resnet(depth, width)
            for depth, width in (
                (28, 10),
                (34, 10),
                (34, 20),
                (70, 16),
                (82, 8),
                (94, 16),
                (106, 16),
            )
        },
        "lenet": LeNet,
        "preact_resnet18": partial(PreActResNet, 64, (64, 128, 256, 512), 2),
        "preact_resnet18_raw": raw_preact_resnet18,
        "resnet8": partial(
            ResNet, (16, 32, 64), 1
        ),  # 6n + 2 layers: three stages of n blocks, the stem, the last layer
        "resnet18": partial(ResNet, (64, 128, 256, 512), 2),
        "resnet20": partial(ResNet, (16, 32, 64), 3),
        "resnet50": partial(
            ResNet, (256, 512, 1024, 2048), (3, 4, 6, 3), block=Bottleneck, stem=64
        ),
        "resnet110": partial(ResNet, (16, 32, 64), 18),
        "robust_wide_resnet70_16": robust_wide_resnet70_16,
        **{
            f"wide_resnet{depth}_{width}": wide_resnet(depth, width)
            for depth, width in ((28, 10), (34, 10), (34, 15), (34, 20), (40, 2), (70, 16))
        },
    },
)


def build(
    arch: str,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> Normalized:
    """Build an architecture with random weights, in training mode, on the CPU.

    `mean` and `std` are those of :meth:`Normalized.set_normalization`. The same `seed` gives the
    same weights; the global random state is not changed.
    """
    checks.seed(seed)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the CUDA generators, which are not forked here.
        torch.default_generator.manual_seed(seed)
        model = _construct(arch, num_classes, image_shape)
    model.set_normalization(mean, std)
    return model


def load_reference(reference: Reference, options: LoadOptions) -> Normalized:
    """The model of `zoo:NAME`, with random weights."""
    checks.one_of("model", reference.body, ARCHITECTURES)
    for name in ("num_classes", "image_shape"):
        checks.require(
            getattr(options, name) is not None, name, f"be given for {reference.text}", None
        )
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("num_classes", "image_shape", "mean", "std")
    }
    return build(reference.body, seed=options.seed or 0, **settings)


def build_empty(arch: str, *, num_classes: int, image_shape: tuple[int, int, int]) -> Normalized:
    """The same architecture without weights (on torch's `meta` device): names and shapes at no
    cost."""
    try:
        with torch.device("meta"):
            return _construct(arch, num_classes, image_shape)
    except RuntimeError as error:  # the number of bytes overflows
        raise checks.InputError(
            f"`num_classes` and `image_shape` must be those of a model that can be built, got "
            f"{num_classes} and {image_shape}"
        ) from error


def _construct(arch: str, num_classes: int, image_shape: tuple[int, int, int]) -> Normalized:
    builder = ARCHITECTURES.get_entry(arch)
    checks.whole("num_classes", num_classes, least=2, most=checks.MAX_CLASSES)
    sides = all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in image_shape)
    checks.require(
        len(image_shape) == 3 and sides,
        "image_shape",
        f"be (C, H, W), each at most {MAX_SIDE}",
        image_shape,
    )
    model = builder(num_classes=num_classes, image_shape=image_shape)
    model.config = {
        "arch": arch,
        "num_classes": str(num_classes),
        "image_shape": ",".join(map(str, image_shape)),
    }
    return model


def allocate(model: nn.Module) -> None:
    """Give a model without weights memory on the CPU, whose values are arbitrary.

    `nn.Module.to_empty` does the same, but of tensors without memory it imports sympy, which is slow.
    """
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
