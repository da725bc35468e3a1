"""Small stand-ins with the functions of timm, torchvision, huggingface_hub and transformers that
loaders call.

The packages themselves cannot be installed beside every build of torch. The names, signatures and
file layouts are those of timm 1.0, torchvision 0.24, huggingface_hub 1.1 and transformers 4.57.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.conv1, self.fc = nn.Conv2d(3, width, 3, 2), nn.Linear(width, num_classes)
        self.num_classes = num_classes
    def forward(self, x):
        assert x.shape[2:] == (SIDE, SIDE), x.shape
        return self.fc(self.conv1(x).relu().mean((2, 3)))
"""
TIMM = (
    NETWORK.replace("SIDE", "24")
    + """
from dataclasses import dataclass, asdict, replace
from typing import Any
@dataclass
class PretrainedCfg:
    url: Any = None
    state_dict: Any = None
    hf_hub_id: Any = None
    hf_hub_filename: Any = None
    architecture: Any = None
    custom_load: bool = False
    input_size: Any = (3, 24, 24)
    fixed_input_size: bool = False
    interpolation: str = "bicubic"
    crop_pct: float = 0.75
    crop_mode: str = "center"
    mean: Any = (0.5, 0.4, 0.3)
    std: Any = (0.2, 0.25, 0.5)
    num_classes: int = 12
    label_offset: Any = None
    label_names: Any = None
    classifier: str = "fc"
    def to_dict(self, remove_source=False, remove_null=True):
        return {key: value for key, value in asdict(self).items() if value is not None}
CFGS = {"tiny_net.a1": PretrainedCfg(hf_hub_id="timm/tiny_net.a1"), "wide_net": PretrainedCfg(url="https://x/wide-0.pth"),
        "odd_net": PretrainedCfg(url="https://x/odd.npz", custom_load=True),
        "vit_net": PretrainedCfg(url="https://x/vit.npz", custom_load=True, hf_hub_id="timm/vit_net")}
CFGS["tiny_net"] = CFGS["tiny_net.a1"]
WIDTHS = {"tiny_net": 4, "wide_net": 8, "odd_net": 2, "vit_net": 4}
def list_models():
    return list(WIDTHS)
def list_pretrained():
    return list(CFGS)
def is_model(name):
    return name.split(".")[0] in WIDTHS
def get_pretrained_cfg(name, allow_unregistered=True):
    return CFGS[name]
def create_model(name, pretrained=False, pretrained_cfg_overlay=None, num_classes=None, **kwargs):
    cfg = replace(CFGS[name], **(pretrained_cfg_overlay or {}))
    model = Net(WIDTHS[name.split(".")[0]], num_classes or cfg.num_classes, **kwargs)
    model.pretrained_cfg = asdict(cfg)
    if pretrained:
        state, strict = {key.removeprefix("old."): value for key, value in cfg.state_dict.items()}, True
        if model.num_classes != cfg.num_classes:  # the head is left out, as in timm
            state.pop("fc.weight"), state.pop("fc.bias")
            strict = False
        model.load_state_dict(state, strict=strict)
    return model
"""
)
TORCHVISION = (
    NETWORK.replace("SIDE", "20")
    + """
import enum, sys, torch
class Preset:
    crop_size, resize_size, mean, std, antialias = [20], [26], [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], True
    class interpolation:
        value = "bilinear"
class Net_Weights(enum.Enum):
    IMAGENET1K_V1 = "one"
    IMAGENET1K_V2 = "two"
    DEFAULT = "two"
    @property
    def url(self):
        return URLS[self.value]
    @property
    def meta(self):
        return {"categories": [f"class {number}" for number in range(12)]}
    transforms = lambda self: Preset()
URLS = {}
def list_models(module=None):
    return ["googlenet", "inception_v3", "other_net", "small_net"]
def get_model_weights(name):
    return Net_Weights
class Inception(Net):
    def __init__(self, num_classes, transform_input=False, aux_logits=True, init_weights=None):
        assert init_weights is not None, "torchvision warns otherwise"
        super().__init__(4, num_classes)
        self.transform_input = transform_input
        if aux_logits:
            self.AuxLogits = nn.Linear(2, 2)
    def forward(self, x):
        return super().forward(x * 0.5 + 0.1 if self.transform_input else x)
def get_model(name, weights=None, num_classes=12, **more):
    model = Inception(num_classes, **more) if name in ("googlenet", "inception_v3") else Net(4, num_classes, **more)
    if weights is not None:
        model.load_state_dict(torch.hub.load_state_dict_from_url(weights.url, progress=True, check_hash=True))
    return model
"""
)
HUB = """
import os
from pathlib import Path
calls = []
def hf_hub_download(repo_id, filename, revision=None):
    calls.append((repo_id, filename, revision))
    path = Path(os.environ["REMOTE"], repo_id, filename)
    if not path.is_file():
        raise FileNotFoundError(f"404 for {repo_id}/{filename}")
    return str(path)
"""
TRANSFORMERS = (
    NETWORK.replace("SIDE", "18")
    + """
import json, os, torch
from types import SimpleNamespace
from pathlib import Path
from safetensors.torch import load_file
calls = []
class ViTForImageClassification(Net):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x), loss=None)
class AutoModelForImageClassification:
    @classmethod
    def from_pretrained(cls, folder, local_files_only=False, trust_remote_code=False, use_safetensors=None, dtype=None,
                        attn_implementation=None, output_loading_info=False):
        # names that differ are reported, not refused, and the type is that of config.json
        assert local_files_only and use_safetensors and not trust_remote_code
        calls.append((attn_implementation, os.environ.get("HF_HUB_OFFLINE")))
        config = json.loads(Path(folder, "config.json").read_text())
        model = ViTForImageClassification(4, len(config["id2label"]))
        model.config = SimpleNamespace(num_labels=model.num_classes)
        state = load_file(Path(folder, "model.safetensors"))
        result = model.load_state_dict(state, strict=False)
        model = model.to(dtype or getattr(torch, config.get("dtype", "float32")))
        report = {"missing_keys": set(result.missing_keys), "unexpected_keys": set(result.unexpected_keys),
                  "mismatched_keys": [], "error_msgs": []}
        return (model, report) if output_loading_info else model
"""
)
SOURCES = {
    "timm": TIMM,
    "torchvision": "from torchvision import models\n",
    "torchvision.models": TORCHVISION,
    "huggingface_hub": HUB,
    "transformers": TRANSFORMERS,
}


@contextmanager
def installed(folder: Path, *names: str) -> Iterator[None]:
    """The stand-ins as packages that can be imported."""
    before = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in SOURCES
    }
    for name in before:
        del sys.modules[name]
    for name in names:
        path = folder / Path(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(SOURCES[name])
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in SOURCES]:
            del sys.modules[name]
        sys.modules.update(before)


def weights(width: int = 4, num_classes: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """The state dict of one of the networks above."""
    torch.manual_seed(seed)
    parts = {"conv1": nn.Conv2d(3, width, 3), "fc": nn.Linear(width, num_classes)}
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }


def logits(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the networks above compute of preprocessed images."""
    z = nn.functional.conv2d(x, state["conv1.weight"], state["conv1.bias"], 2).relu().mean((2, 3))
    return nn.functional.linear(z, state["fc.weight"], state["fc.bias"])


def write_cache(home: Path, repository: str, files: dict[str, Any]) -> Path:
    """Files in the cache of Hugging Face: blobs by their SHA-256, with links from the snapshot of a
    commit."""
    root, commit = (
        home / "hub" / f"models--{repository.replace('/', '--')}",
        "0123456789abcdef0123456789abcdef01234567",
    )
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        path = root / "new"
        write(path, name, content)
        blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (root / "snapshots" / commit / name).symlink_to(blob)
    return root


def write(path: Path, name: str, content: Any) -> None:
    """A JSON file, a safetensors file or a pickle."""
    if name.endswith(".json"):
        path.write_text(json.dumps(content))
    elif name.endswith(".safetensors"):
        save_file(content, path)
    else:
        torch.save(content, path)
