"""RobustBench's checkpoints of networks that the package timm implements: ConvNeXt, Swin, XCiT,
ViT, ResNet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from equipoise.models import checkpoint
from equipoise.models.sources import hub

XCIT_DEPTH = 12  # of all XCiT models of RobustBench
XCIT_PATCH = 4  # pixels of a patch on CIFAR; 16 in the published network


def load(
    path: Path, state: Mapping[str, Tensor], name: str, *, classes: int, side: int
) -> nn.Module:
    """A network of timm with the weights of this state dict, for normalised images of this size."""
    timm = hub.require_package("timm", f"timm:{name}")
    settings: dict[str, Any] = {"depth": XCIT_DEPTH} if name.startswith("xcit_") else {}
    network = timm.create_model(name, pretrained=False, num_classes=classes, **settings)
    if name.startswith("xcit_") and side == 32:
        use_small_patches(network)
    state = to_timm_names(state, network, name)
    checkpoint.copy_weights(path, network, state, name)
    loaded: nn.Module = network
    return loaded


def to_timm_names(state: Mapping[str, Tensor], network: nn.Module, name: str) -> dict[str, Tensor]:
    """The weights under the names of today's timm.

    It changed those of Swin and XCiT since the files were made; ConvNeXt V2 has the names of its
    authors' code, and numbers for the normalisation, which that code does not use.
    """
    if name.startswith("swin_"):
        from timm.models.swin_transformer import checkpoint_filter_fn
    elif name.startswith("xcit_"):
        from timm.models.xcit import checkpoint_filter_fn
    elif name.startswith("convnextv2_"):
        from timm.models.convnext import checkpoint_filter_fn

        state = {key: value for key, value in state.items() if key not in ("mean", "std")}
    else:
        return dict(state)
    return dict(checkpoint_filter_fn(dict(state), network))


def use_small_patches(network: Any) -> None:
    """Let XCiT's stem keep more of small images: two of its four strided convolutions no longer
    reduce them."""
    embedding = network.patch_embed
    for position in (0, 2):
        embedding.proj[position][0].stride = (1, 1)
    embedding.patch_size = XCIT_PATCH
