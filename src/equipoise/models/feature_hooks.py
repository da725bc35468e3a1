"""Looking into a classifier on its way: feature maps of two depths, caught by forward hooks that leave no trace.

One forward pass gives the logits and the maps. Tokens are laid back into maps; maps of two classifiers are brought
to a common size.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks

Taps = tuple[str, str]  # names of two submodules of a base, shallow and deep
Maps = tuple[Tensor, Tensor]
DEEPEST = 4  # how many levels of submodules are looked at
PREFIX = 8  # tokens without a place (class, registers) that may stand before the others


def tapped(model: nn.Module, names: Taps, x: Tensor) -> tuple[Tensor, Maps]:
    """Logits (B, K), and the maps (B, C', H', W') that two submodules gave on the way.

    Args:
        model: images → logits; it is as before afterwards.
        names: of its submodules, as :meth:`torch.nn.Module.get_submodule` knows them.
        x: (B, C, H, W) images.
    """
    caught: dict[str, Any] = {}
    logits = _watched(model, names, x, caught.__setitem__)
    return logits, (_laid(names[0], caught.get(names[0]), x), _laid(names[1], caught.get(names[1]), x))


def _watched(model: nn.Module, names: Sequence[str], x: Tensor, note: Callable[[str, Any], None]) -> Tensor:
    """The model's answer; `note` is told what each submodule gave."""
    found = {name: named(model, name) for name in names}  # all of them before the first is touched
    hooks = [module.register_forward_hook(lambda module, inputs, output, name=name: note(name, output))
             for name, module in found.items()]
    try:
        logits: Tensor = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return logits


def named(model: nn.Module, name: str) -> nn.Module:
    """A submodule; an unknown name is told with the nearest ones."""
    try:
        if not name:  # torch would give the model itself
            raise AttributeError
        return model.get_submodule(name)
    except AttributeError:
        known = [each for each, _ in model.named_modules() if each]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" (near: {', '.join(near)})" if near else f" (there are {', '.join(known[:5])}, …)"
        raise checks.InputError(f"`taps` must name submodules of {type(model).__name__}, got {name!r}{hint}") from None


def _laid(name: str, output: Any, x: Tensor) -> Tensor:
    """(B, C, H', W') from a map or from tokens (B, N, C)."""
    if isinstance(output, Tensor) and output.dim() == 4:
        return output
    grid = _grid(output, x)
    told = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    checks.require(grid is not None, f"tap {name}", "give features with a place in the image, as (B, C, H, W) or "
                   "tokens (B, N, C) of a grid", told)
    assert grid is not None
    high, wide = grid
    laid: Tensor = output[:, output.shape[1] - high * wide :].transpose(1, 2).unflatten(2, (high, wide))
    return laid


def _grid(output: Any, x: Tensor) -> tuple[int, int] | None:
    """Height and width of a map, or of tokens laid out like the image; None for what has no place in it.

    Up to :data:`PREFIX` tokens may stand before the grid; as few as possible.
    """
    if not isinstance(output, Tensor) or len(output) != len(x):
        return None
    if output.dim() == 4:
        return output.shape[2], output.shape[3]
    if output.dim() != 3:
        return None
    common = math.gcd(x.shape[2], x.shape[3])
    unit = (x.shape[2] // common, x.shape[3] // common)  # the smallest grid of the image's shape
    for prefix in range(PREFIX + 1):
        side = math.isqrt(max(output.shape[1] - prefix, 0) // (unit[0] * unit[1]))
        if side and side * side * unit[0] * unit[1] == output.shape[1] - prefix:
            return side * unit[0], side * unit[1]
    return None


def matched(maps: Sequence[Tensor]) -> list[Tensor]:
    """Feature maps of two bases at the size of the smaller."""
    least = (min(m.shape[2] for m in maps), min(m.shape[3] for m in maps))
    return [pooled(m, least) for m in maps]


def pooled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, *size) by averages; a map of that size as it is."""
    return maps if tuple(maps.shape[2:]) == size else F.adaptive_avg_pool2d(maps, size)


def find_taps(model: nn.Module, example: Tensor) -> Taps:
    """Two sensible depths of any classifier.

    Where maps shrink from stage to stage (ResNets, ConvNeXt), the ends of the first two stages; where they do not
    (ViT), a quarter and half of the way through the longest row of equal blocks; without stages and blocks, the last
    single layers of the first two sizes. Stages are submodules with submodules; both are looked at level by level.

    Args:
        model: images → logits.
        example: a few images.
    """
    given: dict[str, tuple[int, int]] = {}  # in the order of the pass

    def note(name: str, output: Any) -> None:
        grid = _grid(output, example)
        if grid is not None and grid != (1, 1):
            given[name] = grid

    modules = {name: module for name, module in model.named_modules() if name and name.count(".") < DEEPEST}
    with torch.no_grad():
        _watched(model, list(modules), example, note)
    stages = {name: grid for name, grid in given.items() if any(modules[name].children())}
    if found := _ends(stages):
        return found
    rows: dict[tuple[str, type], list[str]] = {}
    for name in stages:
        rows.setdefault((name.rpartition(".")[0], type(modules[name])), []).append(name)
    longest = max(rows.values(), key=len, default=[])
    # Before single layers: a ViT may begin with one that resizes or normalises, and images are no features.
    if len(longest) >= 2:
        return longest[max(len(longest) // 4 - 1, 0)], longest[max(len(longest) // 2 - 1, 1)]
    found = _ends(given)
    checks.require(found is not None, "taps", f"be given for {type(model).__name__}, which has neither two sizes of "
                   "feature maps nor a row of blocks", list(given)[:3])
    assert found is not None
    return found


def _ends(given: dict[str, tuple[int, int]]) -> Taps | None:
    """The last submodules of the first two sizes, on the first level that has two."""
    for level in range(DEEPEST):
        ends = list({grid: name for name, grid in given.items() if name.count(".") == level}.values())
        if len(ends) >= 2:
            return ends[0], ends[1]
    return None
