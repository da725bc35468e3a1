"""RobustBench's checkpoints of timm's networks, where timm can be imported: names and outputs on
made-up weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import models
from equipoise.models.layers.resizing import Preprocess
from equipoise.models.sources import robustbench, robustbench_timm

try:
    import timm
except Exception as error:  # beside another version of torch, torchvision raises RuntimeError
    pytest.skip(f"timm cannot be imported: {error!r}", allow_module_level=True)

XCIT = "cifar10/Linf/Debenedetti2022Light_XCiT-S12"
X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def write(root: Path, entry: robustbench.Entry, content: object, name: str | None = None) -> None:
    path = root / entry.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path if name is None else path.with_name(name))


def with_arch(monkeypatch: pytest.MonkeyPatch, key: str, arch: str) -> robustbench.Entry:
    """The entry with a smaller network of the same family, for a test."""
    entry = replace(robustbench.catalog()[key], arch=f"timm:{arch}")
    monkeypatch.setitem(robustbench.catalog(), key, entry)
    return entry


def old_swin_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As timm named them before 0.9, when the files were made: downsampling at the end of a stage,
    no `head.fc`."""
    names = {
        key: re.sub(
            r"^layers\.(\d)\.downsample\.",
            lambda found: f"layers.{int(found[1]) - 1}.downsample.",
            key,
        )
        for key in state
    }
    old = {names[key].replace("head.fc.", "head."): value for key, value in state.items()}
    return {
        **old,
        "layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49, dtype=torch.int64),
        "layers.0.blocks.1.attn_mask": torch.zeros(64, 49, 49),
    }


def test_xcit_on_cifar_keeps_patches_of_four_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published file has another name than RobustBench's others, and lies in the same
    folder."""
    monkeypatch.setattr(robustbench_timm, "XCIT_DEPTH", 1)
    network: Any = timm.create_model("xcit_nano_12_p16_224", num_classes=10, depth=1).eval()
    entry = with_arch(monkeypatch, XCIT, "xcit_nano_12_p16_224")
    write(
        tmp_path,
        entry,
        {"state_dict": {f"module.{key}": value for key, value in network.state_dict().items()}},
        "debenedetti2022light-xcit-s-cifar10-linf.pth.tar",
    )
    model = eq.load_model(f"robustbench:{XCIT}?weights={tmp_path}")
    for position in (0, 2):
        network.patch_embed.proj[position][0].stride = (1, 1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (entry.mean, entry.std))
    with torch.no_grad():
        torch.testing.assert_close(model(X), network((X - mean) / std))
        assert network.patch_embed(X)[1] == (8, 8)
    assert "10 classes; input 3×32×32; normalisation: mean 0.4914,0.4822,0.4465" in str(
        models.info_of(model)
    )


@pytest.mark.parametrize(
    ("key", "arch"),
    [
        ("imagenet/Linf/Liu2023Comprehensive_Swin-B", "swin_tiny_patch4_window7_224"),
        ("imagenet/Linf/Liu2023Comprehensive_ConvNeXt-B", "convnext_atto"),
        ("imagenet/Linf/Salman2020Do_R18", "resnet18"),
    ],
)
def test_networks_of_imagenet(
    key: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = timm.create_model(arch, num_classes=1000).eval()
    state = network.state_dict()
    entry = with_arch(monkeypatch, key, arch)
    write(
        tmp_path,
        entry,
        {
            f"model.{name}": value
            for name, value in (old_swin_names(state) if arch.startswith("swin") else state).items()
        },
    )
    model = eq.load_model(f"robustbench:{key}?weights={tmp_path}")
    first = model[0]  # type: ignore[index]
    assert isinstance(first, Preprocess) and str(first.settings) == entry.preset
    for name, value in network.state_dict().items():
        assert torch.equal(model[1].state_dict()[name], value), name  # type: ignore[index]


def authors_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names and shapes of ConvNeXt V2 in the code of its authors, which MixedNUTS uses."""
    names = [
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
        (r"\.blocks\.", "."),
        ("conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"mlp\.grn\.weight", "grn.gamma"),
        (r"mlp\.grn\.bias", "grn.beta"),
        (r"^head\.norm\.", "norm."),
        (r"^head\.fc\.", "head."),
    ]
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in names:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value.view(1, 1, 1, -1) if ".grn." in key else value
    return {**renamed, "mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)}


def test_mixednuts_on_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accurate base takes images as they are, as in the released code; the robust one
    normalises them."""
    monkeypatch.setitem(
        robustbench.ACCURATE_BASES, "imagenet", ("timm:convnextv2_atto", (0.0,) * 3, (1.0,) * 3)
    )
    swin = with_arch(
        monkeypatch, robustbench.ROBUST_BASES["imagenet"], "swin_tiny_patch4_window7_224"
    )
    entry = robustbench.find_entry("imagenet/Linf/Bai2024MixedNUTS")
    networks = [
        timm.create_model(name, num_classes=1000).eval()
        for name in ("convnextv2_atto", "swin_tiny_patch4_window7_224")
    ]
    for network, names, file in zip(
        networks, (authors_names, old_swin_names), entry.files, strict=True
    ):
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(0.02 * torch.randn_like(weight))  # also those that are zero at first
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save(names(network.state_dict()), tmp_path / file)
    mixture = eq.load_model(f"robustbench:{entry.key}?weights={tmp_path}&preset=none")
    x = torch.rand(2, 3, 224, 224)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (swin.mean, swin.std))
    with torch.no_grad():
        torch.testing.assert_close(mixture.accurate(x), networks[0](x))  # type: ignore[operator]
        torch.testing.assert_close(mixture.robust(x), networks[1]((x - mean) / std))  # type: ignore[operator]
    assert mixture.alpha == 0.99712664145189
    resized = eq.load_model(f"robustbench:{entry.key}?weights={tmp_path}")
    assert str(resized.accurate[0].settings) == str(resized.robust[0].settings) == entry.preset  # type: ignore[union-attr, index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    sorted(key for key, entry in robustbench.catalog().items() if entry.arch.startswith("timm:")),
)
def test_every_name_is_known_to_timm(key: str) -> None:
    entry = robustbench.catalog()[key]
    name = entry.arch.removeprefix("timm:")
    settings = {"depth": robustbench_timm.XCIT_DEPTH} if name.startswith("xcit_") else {}
    with torch.device("meta"):
        network = timm.create_model(
            name, num_classes=robustbench.CLASSES[entry.dataset], **settings
        )
    assert len(network.state_dict()) > 50
