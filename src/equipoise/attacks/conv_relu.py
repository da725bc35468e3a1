"""Copies of a network for CUDA in reduced precision: convolution, bias, residual and ReLU are one
cuDNN kernel.

The patterns are found with `torch.fx`, so that nothing has to be compiled.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from equipoise.attacks.fused import FullPrecision
from equipoise.attacks.fused_layers import ConvReLU, Projection, masked_sum
from equipoise.models.layers.tta import TTAClassifier

CHANNELS = 8  # tensor cores compute with multiples of so many
_RELU = (F.relu, F.relu_, torch.relu, torch.relu_)
_ADD = (operator.add, operator.iadd, torch.add)
_RELU_METHODS, _ADD_METHODS = ("relu", "relu_"), ("add", "add_")


def fuse_activations(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose convolutions have weights of `dtype` and take the ReLU that follows them into
    one kernel.

    Wherever the code of a module cannot be followed symbolically, its submodules are tried instead.
    Everything but the convolutions keeps its precision: call the copy under autocast.
    """
    return _fuse(copy.deepcopy(model), dtype)


def fuse_activations_if(
    accept: Callable[[nn.Module], bool], model: nn.Module, dtype: torch.dtype
) -> nn.Module | None:
    """The copy of :func:`fuse_activations` if it runs and is accepted, else None."""
    try:
        copy_ = fuse_activations(model, dtype)
        return copy_ if accept(copy_) else None
    except Exception:  # whatever fails in a foreign module, the module itself still works
        return None


def _fuse(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
    except Exception:  # whatever `torch.fx` cannot follow in the code of a foreign module
        return _fuse_children(module, dtype)
    traced = fx.GraphModule(module, graph)
    for node in list(graph.nodes):  # what a batch norm that was folded leaves behind
        if node.op == "call_module" and isinstance(traced.get_submodule(node.target), nn.Identity):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if dtype == torch.bfloat16:
        for node in list(graph.nodes):
            _fill_up_channels(traced, node)
    for node in list(graph.nodes):
        _fuse_into_convolution(traced, node, dtype)
    if dtype == torch.bfloat16 and masked_sum() is not None:  # for gradients
        for node in list(graph.nodes):
            _split_for_readers(traced, node)
    for name in {node.target for node in graph.nodes if node.op == "call_module"}:
        leaf = traced.get_submodule(name)
        if isinstance(leaf, nn.Conv2d):
            traced.set_submodule(name, _reduce_convolution(leaf, dtype))
        else:
            _fuse_children(leaf, dtype)
    graph.lint()
    traced.recompile()
    return traced.eval()


def _fuse_children(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for name, child in module.named_children():
        # A graph would lose hooks and other methods.
        if _has_hooks(child) or isinstance(child, TTAClassifier) or hasattr(child, "base_outputs"):
            _fuse_children(child, dtype)
        elif isinstance(child, nn.Conv2d):
            setattr(module, name, _reduce_convolution(child, dtype))
        elif any(child.children()):
            setattr(module, name, _fuse(child, dtype))
    return module


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            isinstance(m, FullPrecision)
            or _has_hooks(m)
            or super().is_leaf_module(m, module_qualified_name)
        )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _fill_up_channels(traced: fx.GraphModule, node: fx.Node) -> None:
    """Give the convolution of a colour image zero channels up to the eight that tensor cores need.

    Only where windows overlap: those of a ViT, which cover every pixel once, become slower.
    """
    conv = traced.get_submodule(str(node.target)) if _is_fusable(traced, node) else None
    if (
        not isinstance(conv, nn.Conv2d)
        or conv.in_channels != 3
        or conv.kernel_size[0] <= conv.stride[0]
        or _has_readers(traced, node)
    ):
        return
    conv, filling = _own_convolution(traced, node), (0, 0, 0, 0, 0, CHANNELS - 3)
    conv.in_channels = CHANNELS
    conv.weight = nn.Parameter(F.pad(conv.weight.detach(), filling), requires_grad=False)
    with traced.graph.inserting_before(node):
        node.update_arg(0, traced.graph.call_function(F.pad, (node.args[0], filling)))


def _fuse_into_convolution(traced: fx.GraphModule, relu: fx.Node, dtype: torch.dtype) -> None:
    """Replace relu(conv(x)) or relu(conv(x) + z) by one call, if nothing else reads what lies
    between."""
    if not _is_relu(traced, relu):
        return
    inner: Any = relu.args[0]
    operands = [inner]
    if _is_sum(inner) and len(inner.users) == 1:
        operands = list(inner.args)
    for number, node in enumerate(operands):
        if len(node.users) == 1 and _is_fusable(traced, node):
            others = operands[:number] + operands[number + 1 :]
            for other in others:
                _move_bias(traced, other, node)
            traced.set_submodule(node.target, ConvReLU(traced.get_submodule(node.target), dtype))  # type: ignore[arg-type]
            with traced.graph.inserting_before(relu):
                fused = traced.graph.call_module(node.target, (node.args[0], *others))
            relu.replace_all_uses_with(fused)
            for old in (relu, *([inner] if others else []), node):
                traced.graph.erase_node(old)
            return


def _move_bias(traced: fx.GraphModule, source: fx.Node, node: fx.Node) -> None:
    """Move the bias of a convolution to the one whose output is added to its own: adding it would
    be a kernel more."""
    if (
        len(source.users) != 1
        or not _is_fusable(traced, source)
        or _has_readers(traced, source)
        or _has_readers(traced, node)
    ):
        return
    conv, other = _own_convolution(traced, source), _own_convolution(traced, node)
    if conv.bias is not None and conv.out_channels == other.out_channels:
        bias = conv.bias if other.bias is None else other.bias + conv.bias
        conv.bias, other.bias = None, nn.Parameter(bias.detach(), requires_grad=False)


def _split_for_readers(traced: fx.GraphModule, node: fx.Node) -> None:
    """Give two readers of a fused convolution an output each: their gradients are then summed in
    its own kernel."""
    conv = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
    if isinstance(conv, ConvReLU) and len(node.users) == 2:
        conv.readers, readers = 2, list(node.users)
        with traced.graph.inserting_after(node):
            outputs = [
                traced.graph.call_function(operator.getitem, (node, number)) for number in range(2)
            ]
        for reader, output in zip(readers, outputs, strict=True):
            reader.replace_input_with(node, output)


def _is_relu(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(traced.get_submodule(str(node.target)), nn.ReLU)
    return (
        (node.op == "call_function" and node.target in _RELU)
        or (node.op == "call_method" and node.target in _RELU_METHODS)
    ) and isinstance(node.args[0], fx.Node)


def _is_sum(node: fx.Node) -> bool:
    """Check for a plain sum of two tensors; a sum with a factor or a number is something else."""
    known = (node.op == "call_function" and node.target in _ADD) or (
        node.op == "call_method" and node.target in _ADD_METHODS
    )
    return (
        known
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(arg, fx.Node) for arg in node.args)
    )


def _is_fusable(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Check for an ordinary convolution that the forward pass calls once."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    calls = sum(
        other.op == "call_module" and other.target == node.target for other in traced.graph.nodes
    )
    module = traced.get_submodule(str(node.target))
    return (
        calls == 1
        and type(module) is nn.Conv2d
        and not _has_hooks(module)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.groups == 1
    )


def _has_readers(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Check whether the code reads the weight or the bias of a convolution itself."""
    return any(
        other.op == "get_attr" and str(other.target).startswith(f"{node.target}.")
        for other in traced.graph.nodes
    )


def _own_convolution(traced: fx.GraphModule, node: fx.Node) -> nn.Conv2d:
    """The convolution of a node, after a copy took its place: another graph may share it."""
    conv = copy.deepcopy(traced.get_submodule(str(node.target)))
    assert isinstance(conv, nn.Conv2d)
    traced.set_submodule(str(node.target), conv)
    return conv


def _reduce_convolution(conv: nn.Conv2d, dtype: torch.dtype) -> nn.Module:
    """The convolution with weights of `dtype`; the 1×1 convolution with a stride of a shortcut as a
    projection."""
    is_projection = (
        type(conv) is nn.Conv2d
        and not _has_hooks(conv)
        and conv.kernel_size == (1, 1)
        and conv.stride != (1, 1)
        and conv.padding == (0, 0)
        and conv.groups == 1
    )
    return Projection(conv, dtype) if is_projection else conv.to(dtype)
