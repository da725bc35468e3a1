"""Names of weights in RobustBench's files, and how they become those of our architectures.

RobustBench holds checkpoints of many authors, each with the names of its own code. What is wrapped
around the weights is removed in the order in which RobustBench does it: `last`, `state_dict`, then
the prefixes `module.` and `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor

from equipoise.models.torch_files import STATE_DICT_KEYS

NESTED = ("last", *STATE_DICT_KEYS)  # keys under which files hold their weights
PREFIXES = ("module.", "model.")

Replacement = str | Callable[[re.Match[str]], str]


def _from_one(pattern: str, replacement: str) -> tuple[str, Replacement]:
    """A rule in which the first number of `pattern`, counted from 0, is counted from 1 in the
    replacement."""

    def replace(match: re.Match[str]) -> str:
        first, *rest = match.groups()
        return replacement.format(int(first) + 1, *rest)

    return pattern, replace


_SWISH_BLOCK: list[tuple[str, Replacement]] = [
    (r"\.batchnorm_0\.", ".bn1."),
    (r"\.batchnorm_1\.", ".bn2."),
    (r"\.shortcut\.", ".downsample."),
    (r"^batchnorm\.", "bn."),
    (r"^logits\.", "fc."),
]
_DEEPMIND_WIDE: list[tuple[str, Replacement]] = [
    (r"^init_conv\.", "conv1."),
    _from_one(r"^layer\.(\d)\.block\.(\d+)\.", "layer{}.{}."),
    (r"\.conv_1\.", ".conv2."),
    (r"\.conv_0\.", ".conv1."),
    *_SWISH_BLOCK,
]
_DEEPMIND_PREACT: list[tuple[str, Replacement]] = [
    (r"^conv_2d\.", "conv1."),
    _from_one(r"^layer_(\d)\.(\d+)\.", "layer{}.{}."),
    (r"\.conv_2d_1\.", ".conv1."),
    (r"\.conv_2d_2\.", ".conv2."),
    *_SWISH_BLOCK,
]
_TRADES_WIDE: list[tuple[str, Replacement]] = [
    (r"^bn1\.", "bn."),
    (r"^block(\d)\.layer\.(\d+)\.", r"layer\1.\2."),
    (r"\.convShortcut\.", ".downsample.0."),
]
_SMALL_RESNET: list[tuple[str, Replacement]] = [
    (r"\.shortcut\.", ".downsample."),
    (r"^linear\.", "fc."),
]
_BIT: list[tuple[str, Replacement]] = [
    (r"^root\.conv\.", "conv1."),
    (r"^head\.gn\.", "gn."),
    (r"^head\.conv\.", "fc."),
    (r"^body\.block(\d)\.unit(\d+)\.", lambda match: f"layer{match[1]}.{int(match[2]) - 1}."),
]

# Rules by how the name of the architecture begins; the first that fits.
_RULES: dict[str, list[tuple[str, Replacement]]] = {
    "deepmind_wide": _DEEPMIND_WIDE,
    "robust_wide": _DEEPMIND_WIDE,
    "deepmind_preact": _DEEPMIND_PREACT,
    "wide_resnet": _TRADES_WIDE,
    "preact_resnet": _SMALL_RESNET,
    "resnet": _SMALL_RESNET,
    "bit_resnet": _BIT,
}
_NORMALIZATION = {
    "mu": "mean",
    "sigma": "std",
    "mean": "mean",
    "std": "std",
    "normalize.mean": "mean",
    "normalize.std": "std",
}
_UNUSED = re.compile(
    r"^sub_block1\."
)  # a block of the first TRADES code that its network never runs


def remove_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the prefixes of wrappers."""
    for prefix in PREFIXES:
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def rename(state: Mapping[str, Tensor], arch: str) -> dict[str, Tensor]:
    """The weights of a RobustBench file, without prefixes, under the names of our architecture."""
    rules = next(rules for start, rules in _RULES.items() if arch.startswith(start))
    renamed = {}
    for key, value in state.items():
        if _UNUSED.match(key):
            continue
        if key in _NORMALIZATION:
            renamed[_NORMALIZATION[key]] = value.reshape(1, -1, 1, 1)
            continue
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        # The last layer of BiT is a 1×1 convolution of a single pixel.
        renamed[key] = value.flatten(1) if key == "fc.weight" else value
    return renamed
