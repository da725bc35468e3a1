"""Faster copies of a network, for the thousands of passes of an attack.

Batch norms are folded into the convolutions before them, channels lie last in memory, and the last
layer keeps full precision where the others are reduced. A success on a copy counts only after the
network itself has confirmed it, so a copy may differ slightly; one that differs clearly is not
used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.models.feature_hooks import active_hooks


def fuse(model: nn.Module, x: Tensor, heads: Sequence[int] | None = None) -> nn.Module:
    """A faster copy of a model in evaluation mode, which must agree with it on the images x; or the
    model itself.

    `heads` are the numbers of outputs of its last layers; all columns that the model returns if not
    given.
    """
    if not any(isinstance(sub, nn.Conv2d) for sub in model.modules()):
        return model
    try:
        with torch.no_grad():
            logits = model(x)
            for fold in (True, False):
                candidate = copy.deepcopy(model).requires_grad_(False)
                if fold:
                    _fold_batch_norms(candidate, x)
                for sub in list(candidate.modules()):
                    _keep_head_precision(sub, heads or logits.shape[1:])
                # Convolutions follow the layout of their weights, so images stay contiguous.
                candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                if agree(candidate(x), logits, columns=getattr(model, "columns", None)):
                    _check_backward(candidate, x)
                    return candidate
    except Exception:  # whatever fails in a foreign module, the module itself still works
        pass
    return model


def channels_last_copy(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy for forward passes that computes with channels last, which is faster; the model itself
    where that fails or gives other outputs on the images x."""
    if not any(isinstance(sub, nn.Conv2d) for sub in model.modules()):
        return model
    try:
        candidate = copy.deepcopy(model).requires_grad_(False)
        candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            return candidate if agree(candidate(x), model(x)) else model
    except Exception:  # such as `.view` after a convolution, which needs contiguous activations
        return model


def _check_backward(model: nn.Module, x: Tensor) -> None:
    """Raise the error of a backward pass that fails, if the model has gradients."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        outputs = model(point)
        if outputs.requires_grad:
            torch.autograd.grad(outputs.sum(), point)


def agree(
    z: Tensor, expected: Tensor, tolerance: float = 1e-3, columns: Sequence[int] | None = None
) -> bool:
    """Check whether logits differ by less than a part of their spread; infinite ones must be equal.

    Outputs that stand side by side in so many `columns` each have their own spread.
    """
    if columns is not None:
        parts = zip(
            z.split(list(columns), dim=1), expected.split(list(columns), dim=1), strict=True
        )
        return all(agree(one, other, tolerance) for one, other in parts)
    z, finite = z.to(expected.dtype), expected.isfinite()
    same_infinities, values = torch.equal(z[~finite], expected[~finite]), expected[finite]
    if values.numel() == 0:
        return same_infinities
    spread = (values.amax() - values.amin()).clamp_min(torch.finfo(values.dtype).tiny)
    return same_infinities and bool((z[finite] - values).abs().amax() <= tolerance * spread)


def _fold_batch_norms(model: nn.Module, x: Tensor) -> None:
    """Set w ← w·γ/σ, b ← (b − μ)·γ/σ + β in every convolution that feeds a batch norm, which is
    removed."""
    names = {sub: name for name, sub in model.named_modules()}
    for convolution, norm in _foldable_pairs(model, x):
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            continue
        scale = (variance + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight
        bias = -mean * scale if convolution.bias is None else (convolution.bias - mean) * scale
        if norm.bias is not None:
            bias = bias + norm.bias
        convolution.weight = nn.Parameter(
            convolution.weight * scale.view(-1, 1, 1, 1), requires_grad=False
        )
        convolution.bias = nn.Parameter(bias, requires_grad=False)
        parent, _, leaf = names[norm].rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())


def _foldable_pairs(model: nn.Module, x: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions whose output goes into a batch norm in a forward pass, each of both used once.

    Observed with hooks, whatever the code of the module looks like. A convolution with another hook
    (of a gate that reads its features) is left out. Other readers of the tensor are not noticed
    here; the copy is compared afterwards.
    """
    outputs: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    pairs: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []
    calls: list[nn.Module] = []

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append(module)
        if isinstance(module, nn.Conv2d) and len(active_hooks(module)) == 1:
            outputs[id(output)] = (
                module,
                output,
            )  # holding the tensor keeps its id from being used again

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.BatchNorm2d) and id(inputs[0]) in outputs:
            pairs.append((outputs[id(inputs[0])][0], module))

    watched = [sub for sub in model.modules() if isinstance(sub, nn.Conv2d | nn.BatchNorm2d)]
    hooks = [sub.register_forward_hook(after) for sub in watched]
    hooks += [sub.register_forward_pre_hook(before) for sub in watched]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (convolution, norm)
        for convolution, norm in pairs
        if calls.count(convolution) == 1 and calls.count(norm) == 1
    ]


class FullPrecision(nn.Module):
    """A layer that computes in the precision of its weights inside a region of reduced
    precision."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The output of the layer."""
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.to(self.layer.weight.dtype))
            return out


def _keep_head_precision(parent: nn.Module, heads: Sequence[int]) -> None:
    """Rounding logits to eight bits would hide the small gains that an attack depends on."""
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear) and child.out_features in heads:
            setattr(parent, name, FullPrecision(child))
