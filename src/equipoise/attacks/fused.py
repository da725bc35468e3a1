"""A copy of a network that computes the same function faster, for the thousands of passes of an attack.

AttackBatch norms are folded into the convolutions before them, channels lie last in memory, and the last layer
keeps full precision where the others are reduced. What the copy finds counts only after the network itself
has confirmed it, so a copy may be slightly off; one that is clearly off is not used.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

# Their decisions in a forward pass are about shapes and settings.
_TRUSTED = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def swift(model: nn.Module, x: Tensor) -> nn.Module:
    """A faster equal of a model in evaluation mode, or the model itself where there is nothing to gain.

    Args:
        model: images (B, C, H, W) → logits (B, K).
        x: a few images, on which the copy must agree with the model.
    """
    if not any(isinstance(sub, nn.Conv2d) for sub in model.modules()):
        return model
    try:
        with torch.no_grad():
            truth = model(x)
            for candidate in (_folded(model, x), _copied(model)):
                for sub in list(candidate.modules()):
                    _protect_heads(sub, truth.shape[1])
                candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                if agree(candidate(x.contiguous(memory_format=torch.channels_last)), truth):
                    return candidate
    except Exception:  # whatever a foreign module objects to, the module itself still works
        pass
    return model


def frozen(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy for forward passes on the CPU alone: traced, and its layers fused; or the model itself.

    A trace follows one path: the copy must agree with the model also on fewer images, and a foreign model that
    turns tensors into Python numbers or decisions on its way is not traced at all.
    """
    x = x[torch.arange(max(len(x), 4), device=x.device) % len(x)]  # of fewer images "fewer" would be no other number
    try:
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            traced = torch.jit.trace(model, x, check_trace=False)
            if any(_decided(warning) for warning in told):
                return model
            copy_: nn.Module = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
            if all(agree(copy_(part), model(part)) for part in (x, x, x[:3], x[:3])):  # twice: the second is optimised
                return copy_
    except Exception:
        pass
    return model


def _decided(told: warnings.WarningMessage) -> bool:
    """Whether a trace took a number out of the tensors, in code that is neither ours nor torch's."""
    own = told.filename.startswith(_TRUSTED)
    return not own and told.category.__name__ == "TracerWarning" and "to a Python" in str(told.message)


def agree(z: Tensor, truth: Tensor, tolerance: float = 1e-3) -> bool:
    """Whether two sets of logits differ by less than a part of their spread; infinite ones must be the same."""
    z, finite = z.to(truth.dtype), truth.isfinite()
    if not torch.equal(z[~finite], truth[~finite]):
        return False
    said = truth[finite]
    if said.numel() == 0:
        return True
    spread = (said.amax() - said.amin()).clamp_min(1e-6)
    return bool((z[finite] - said).abs().amax() <= tolerance * spread)


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def _folded(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with w ← w·γ/σ, b ← (b − μ)·γ/σ + β in every convolution that feeds a batch norm."""
    twin = _copied(model)
    names = {sub: name for name, sub in twin.named_modules()}
    for convolution, norm in _pairs(twin, x):
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            continue
        scale = (variance + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight
        bias = -mean * scale if convolution.bias is None else (convolution.bias - mean) * scale
        if norm.bias is not None:
            bias = bias + norm.bias
        convolution.weight = nn.Parameter(convolution.weight * scale.view(-1, 1, 1, 1), requires_grad=False)
        convolution.bias = nn.Parameter(bias, requires_grad=False)
        parent, _, leaf = names[norm].rpartition(".")
        setattr(twin.get_submodule(parent), leaf, nn.Identity())
    return twin


def _pairs(model: nn.Module, x: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions and batch norms that pass one tensor on in a forward pass, each used once.

    Seen from outside, whatever the code of the module looks like. A convolution that somebody else listens to (a gate
    that taps it) keeps its output; that nobody else reads the tensor is not seen, and is checked on the result.
    """
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    met: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []
    calls: list[nn.Module] = []

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append(module)
        if isinstance(module, nn.Conv2d) and len(module._forward_hooks) == 1:
            made[id(output)] = (module, output)  # holding the tensor keeps its id from being used again

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.BatchNorm2d) and id(inputs[0]) in made:
            met.append((made[id(inputs[0])][0], module))

    watched = [sub for sub in model.modules() if isinstance(sub, nn.Conv2d | nn.BatchNorm2d)]
    hooks = [sub.register_forward_hook(after) for sub in watched]
    hooks += [sub.register_forward_pre_hook(before) for sub in watched]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [(convolution, norm) for convolution, norm in met
            if calls.count(convolution) == 1 and calls.count(norm) == 1]


class _Full(nn.Module):
    """A layer that keeps the precision of its weights inside a region of reduced precision."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.to(self.layer.weight.dtype))
            return out


def _protect_heads(parent: nn.Module, classes: int) -> None:
    """Rounding logits to eight bits would hide the small gains that an attack lives on."""
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear) and child.out_features == classes:
            setattr(parent, name, _Full(child))
