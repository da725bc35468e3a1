"""Feature maps at two depths of a classifier, recorded by forward hooks.

One forward pass gives the logits and the maps. Tokens of a transformer are rearranged into maps.

The hook is one function without state, so that copies and pickles of a model keep it. It hands
outputs to the passes of its own thread: concurrent passes through one model never see each other's
features. It is removed when the pass ends, or with the last object that keeps it
(:func:`keep_hooks`); until then a pickle of the whole module refers to this file, and
`torch.jit.script` does not compile the module.
"""

from __future__ import annotations

import difflib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.models.layers.tta import TTAClassifier

FeatureLayers = tuple[str, str]  # names of two submodules of a classifier, shallow and deep
FeatureMaps = tuple[Tensor, Tensor]
MAX_DEPTH = 4  # levels of nested submodules that are searched for feature layers
MAX_PREFIX = 8  # class and register tokens that may precede the image tokens
Record = Callable[[str, Any, Any], None]  # gets the name, the inputs and the output of a submodule


class _ThisThread(threading.local):  # which torch.compile understands, unlike a ContextVar
    """The passes that record features now, each with the names of its submodules; nested mixtures
    have several."""

    passes: tuple[tuple[dict[nn.Module, list[str]], Record], ...] = ()


_this_thread = _ThisThread()
_users: weakref.WeakKeyDictionary[nn.Module, int] = (
    weakref.WeakKeyDictionary()
)  # of the hook of each module
_users_lock = threading.RLock()  # reentrant: garbage collection may end a user at any moment


def forward_with_features(
    model: nn.Module, layers: FeatureLayers, x: Tensor, *, keeper: object | None = None
) -> tuple[Tensor, FeatureMaps]:
    """Logits (B, K), and the outputs (B, C', H', W') of two submodules in the same forward pass.

    The hooks are removed again, or stay as long as the `keeper` (:func:`keep_hooks`): then a pass
    changes nothing in the model, and other threads may run or copy it at the same time.
    """
    outputs: dict[str, Any] = {}
    logits = _forward_with_hooks(
        model, layers, x, lambda name, _, output: outputs.update({name: output}), keeper
    )
    shallow, deep = (
        _as_map(name, _mean_over_views(model, outputs.get(name), x), x) for name in layers
    )
    return logits, (shallow, deep)


def forward_with_output(model: nn.Module, part: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a model returns, and what a part of it (or itself) returns for the same images.

    In one pass, if the model runs the part once, on these very images; otherwise the part has a
    pass of its own.
    """
    calls: list[tuple[Any, Any]] = []
    if isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
        return model(x), part(x)
    with _recording({part: [""]}, lambda _, inputs, output: calls.append((inputs, output))):
        logits: Tensor = model(x)
    if len(calls) == 1:
        inputs, output = calls[0]
        if len(inputs) == 1 and _is_same_memory(inputs[0], x) and isinstance(output, Tensor):
            return logits, output
    return logits, part(x)


def _is_same_memory(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and (
        value.data_ptr(),
        value.shape,
        value.stride(),
        value.dtype,
    ) == (x.data_ptr(), x.shape, x.stride(), x.dtype)


def _mean_over_views(model: nn.Module, output: Any, x: Tensor) -> Any:
    """What a submodule returns for B images: the mean over the copies of test-time augmentation, if
    there are any."""
    if not isinstance(model, TTAClassifier) or not isinstance(output, Tensor) or output.dim() == 0:
        return output
    copies = (model.count, len(x))
    return (
        output.unflatten(0, copies).mean(dim=0) if output.shape[0] == math.prod(copies) else output
    )


def keep_hooks(keeper: object, modules: Iterable[nn.Module]) -> None:
    """Set hooks that stay until the keeper is garbage-collected."""
    modules = list(modules)
    _add_user(modules)
    weakref.finalize(
        keeper, _remove_user, [weakref.ref(module) for module in modules]
    ).atexit = False


def submodules(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The submodules of these names; an unknown name is an error."""
    return [_submodule(model, name) for name in names]


def active_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The forward hooks of a module without the one of this file where no pass records the features
    of the module."""
    is_read = any(module in names for names, _ in _this_thread.passes)
    return [
        hook for hook in module._forward_hooks.values() if is_read or hook is not _record_output
    ]


def join_features(features: Sequence[FeatureMaps]) -> tuple[Tensor, Tensor]:
    """The shallow and the deep maps of several classifiers, each joined along the channels."""
    shallow, deep = (
        torch.cat(match_sizes([maps[depth] for maps in features]), dim=1) for depth in (0, 1)
    )
    return shallow, deep


def match_sizes(maps: Sequence[Tensor]) -> list[Tensor]:
    """Feature maps (B, C, H, W) average-pooled to the smallest height and width among them."""
    size = (min(m.shape[2] for m in maps), min(m.shape[3] for m in maps))
    return [m if tuple(m.shape[2:]) == size else F.adaptive_avg_pool2d(m, size) for m in maps]


def joined_channels(
    bases: Sequence[nn.Module], layers: Sequence[FeatureLayers], example: Tensor
) -> tuple[int, int]:
    """Channels of the joined shallow and of the joined deep maps of several classifiers."""
    with torch.no_grad():
        features = [
            forward_with_features(base, names, example)[1]
            for base, names in zip(bases, layers, strict=True)
        ]
    return sum(maps[0].shape[1] for maps in features), sum(maps[1].shape[1] for maps in features)


def find_feature_layers(model: nn.Module, example: Tensor) -> FeatureLayers:
    """Select two submodules at sensible depths of any classifier.

    Where maps shrink from stage to stage (ResNet, ConvNeXt), the ends of the first two stages;
    where they do not (ViT), a quarter and half of the way through the longest sequence of equal
    blocks; without stages and blocks, the last single layers of the first two sizes. Stages are
    submodules with submodules, searched level by level.
    """
    grids: dict[str, tuple[int, int]] = {}  # in the order of the forward pass

    def record(name: str, inputs: Any, output: Any) -> None:
        grid = _grid_of(_mean_over_views(model, output, example), example)
        if grid is not None and grid != (1, 1):
            grids[name] = grid

    modules = {
        name: module
        for name, module in model.named_modules()
        if name and name.count(".") < MAX_DEPTH
    }
    with torch.no_grad():
        _forward_with_hooks(model, list(modules), example, record)
    stages = {name: grid for name, grid in grids.items() if any(modules[name].children())}
    if ends := _ends_of_two_sizes(stages):
        return ends
    blocks: dict[tuple[str, type], list[str]] = {}
    for name in stages:
        blocks.setdefault((name.rpartition(".")[0], type(modules[name])), []).append(name)
    longest = max(blocks.values(), key=len, default=[])
    # Before single layers: a ViT may begin with a layer that resizes or normalises, whose output is
    # not a feature map.
    if len(longest) >= 2:
        return longest[max(len(longest) // 4 - 1, 0)], longest[max(len(longest) // 2 - 1, 1)]
    ends = _ends_of_two_sizes(grids)
    if ends is None:
        raise checks.InputError(
            f"`feature_layers` must be given for {type(model).__name__}, which has neither two "
            f"sizes of feature maps nor a sequence of blocks, got {list(grids)[:3]}"
        )
    return ends


def _forward_with_hooks(
    model: nn.Module, names: Sequence[str], x: Tensor, record: Record, keeper: object | None = None
) -> Tensor:
    """The logits of a forward pass; `record` gets the name, inputs and output of every named
    submodule."""
    modules: dict[nn.Module, list[str]] = {}
    for module, name in zip(
        submodules(model, names), names, strict=True
    ):  # all of them before the first hook is set
        modules.setdefault(module, []).append(name)
    with _recording(modules, record, keeper):
        logits: Tensor = model(x)
    return logits


@contextmanager
def _recording(
    modules: dict[nn.Module, list[str]], record: Record, keeper: object | None = None
) -> Iterator[None]:
    """A context in which `record` gets the inputs and outputs of these modules, under their
    names."""
    if keeper is None:
        _add_user(modules)
    elif missing := [
        module for module in modules if not _has_hook(module)
    ]:  # replaced since the last pass
        keep_hooks(keeper, missing)
    outer = _this_thread.passes
    _this_thread.passes = (*outer, (modules, record))
    try:
        yield
    finally:
        _this_thread.passes = outer
        if keeper is None:
            _remove_user([weakref.ref(module) for module in modules])


def _record_output(module: nn.Module, inputs: Any, output: Any) -> None:
    """The forward hook of all feature layers."""
    for names, record in _this_thread.passes:
        for name in names.get(module, ()):
            record(name, inputs, output)


def _has_hook(module: nn.Module) -> bool:
    return any(hook is _record_output for hook in module._forward_hooks.values())


def _add_user(modules: Iterable[nn.Module]) -> None:
    with _users_lock:
        for module in modules:
            _users[module] = _users.get(module, 0) + 1
            if not _has_hook(module):
                module.register_forward_hook(_record_output)


def _remove_user(modules: Iterable[weakref.ref[nn.Module]]) -> None:
    with _users_lock:
        for module in (reference() for reference in modules):
            if module is None:
                continue
            _users[module] -= 1
            if not _users[module]:
                del _users[module]
                for key in [
                    key for key, hook in module._forward_hooks.items() if hook is _record_output
                ]:
                    del module._forward_hooks[key]


def _submodule(model: nn.Module, name: str) -> nn.Module:
    """A submodule by name; the error for an unknown name suggests the nearest ones."""
    try:
        if not name:  # torch would return the model itself
            raise AttributeError
        return model.get_submodule(name)
    except AttributeError:
        known = [path for path, _ in model.named_modules() if path]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" (near: {', '.join(near)})" if near else f" (there are {', '.join(known[:5])}, …)"
        raise checks.InputError(
            f"`feature_layers` must name submodules of {type(model).__name__}, got {name!r}{hint}"
        ) from None


def _as_map(name: str, output: Any, x: Tensor) -> Tensor:
    """(B, C, H', W') from a map or from tokens (B, N, C)."""
    if isinstance(output, Tensor) and output.dim() == 4:
        return output
    grid = _grid_of(output, x)
    if grid is None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise checks.InputError(
            f"`feature layer {name}` must output features with a position in the image, as "
            f"(B, C, H, W) or tokens (B, N, C) of a grid, got {shape!r}"
        )
    high, wide = grid
    tokens: Tensor = (
        output[:, output.shape[1] - high * wide :].transpose(1, 2).unflatten(2, (high, wide))
    )
    return tokens


def _grid_of(output: Any, x: Tensor) -> tuple[int, int] | None:
    """Height and width of a map, or of tokens in a grid of the image's proportions; None for
    anything else.

    Up to :data:`MAX_PREFIX` tokens may precede the grid; as few as possible are assumed.
    """
    if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != x.shape[0]:
        return None
    if output.dim() == 4:
        return output.shape[2], output.shape[3]
    if output.dim() != 3:
        return None
    common = math.gcd(x.shape[2], x.shape[3])
    unit = (
        x.shape[2] // common,
        x.shape[3] // common,
    )  # the smallest grid of the image's proportions
    for prefix in range(MAX_PREFIX + 1):
        side = math.isqrt(max(output.shape[1] - prefix, 0) // (unit[0] * unit[1]))
        if side and side * side * unit[0] * unit[1] == output.shape[1] - prefix:
            return side * unit[0], side * unit[1]
    return None


def _ends_of_two_sizes(grids: dict[str, tuple[int, int]]) -> FeatureLayers | None:
    """The last submodules of the first two sizes, on the first level that has two sizes."""
    for level in range(MAX_DEPTH):
        ends = list(
            {grid: name for name, grid in grids.items() if name.count(".") == level}.values()
        )
        if len(ends) >= 2:
            return ends[0], ends[1]
    return None
