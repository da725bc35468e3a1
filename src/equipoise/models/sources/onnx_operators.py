"""The common operators of ONNX in torch, each a function of its attributes and inputs, so that
gradients flow.

Attributes have the names and defaults of the ONNX standard, operator sets 7 and later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attributes = dict[str, Any]
Inputs = Sequence[Tensor | None]
Operator = Callable[[Attributes, Inputs], Any]

TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}  # by their number in TensorProto


class UnsupportedError(Exception):
    """An operator, or a setting of one, that is not implemented here."""


def _values(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else [int(value) for value in tensor.flatten().tolist()]


def _padding(
    attributes: Attributes,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Padding before and after every axis, in the order of `F.pad`."""
    mode = attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = (
            attributes.get("pads", [0] * 2 * len(kernel))
            if mode == "NOTSET"
            else [0] * 2 * len(kernel)
        )
        both = [(pads[axis], pads[axis + len(kernel)]) for axis in range(len(kernel))]
    else:
        both = []
        for size, side, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            total = max(
                (math.ceil(size / stride) - 1) * stride + dilation * (side - 1) + 1 - size, 0
            )
            small, large = total // 2, total - total // 2
            both.append((small, large) if mode == "SAME_UPPER" else (large, small))
    return [pad for pair in reversed(both) for pad in pair]


def _window(
    attributes: Attributes, x: Tensor, kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and padding of a convolution or a pooling."""
    ones = [1] * len(kernel)
    strides, dilations = attributes.get("strides", ones), attributes.get("dilations", ones)
    return strides, dilations, _padding(attributes, x.shape[2:], kernel, strides, dilations)


def _conv(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    assert x is not None and weight is not None
    if x.dim() != 4:
        raise UnsupportedError(f"Conv of {x.dim() - 2} dimensions")
    strides, dilations, pads = _window(attributes, x, weight.shape[2:])
    return F.conv2d(
        F.pad(x, pads) if any(pads) else x,
        weight,
        bias,
        strides,
        0,
        dilations,
        attributes.get("group", 1),
    )


def _max_pool(attributes: Attributes, inputs: Inputs) -> Tensor:
    (x,) = inputs
    assert x is not None
    kernel = attributes["kernel_shape"]
    strides, dilations, pads = _window(attributes, x, kernel)
    padded = F.pad(x, pads, value=-math.inf) if any(pads) else x
    return F.max_pool2d(padded, kernel, strides, 0, dilations, bool(attributes.get("ceil_mode", 0)))


def _average_pool(attributes: Attributes, inputs: Inputs) -> Tensor:
    (x,) = inputs
    assert x is not None
    kernel = attributes["kernel_shape"]
    strides, _, pads = _window(attributes, x, kernel)
    if attributes.get("ceil_mode", 0):
        raise UnsupportedError("AveragePool with ceil_mode")
    total = F.avg_pool2d(F.pad(x, pads) if any(pads) else x, kernel, strides)
    if not any(pads) or attributes.get("count_include_pad", 0):
        return total
    return total / F.avg_pool2d(F.pad(torch.ones_like(x), pads), kernel, strides)


def _batch_norm(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, scale, bias, mean, variance = inputs
    assert x is not None
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, attributes.get("epsilon", 1e-5))


def _layer_norm(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, scale, bias = (*inputs, None)[:3]
    assert x is not None
    axis = attributes.get("axis", -1)
    return F.layer_norm(x, x.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _gemm(attributes: Attributes, inputs: Inputs) -> Tensor:
    a, b, c = (*inputs, None)[:3]
    assert a is not None and b is not None
    a, b = (a.T if attributes.get("transA", 0) else a), (b.T if attributes.get("transB", 0) else b)
    product: Tensor = attributes.get("alpha", 1.0) * (a @ b)
    return product if c is None else product + attributes.get("beta", 1.0) * c


def _clip(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, low, high = (*inputs, None, None)[:3]
    assert x is not None
    bounds = [
        attributes.get(name) if bound is None else float(bound)
        for name, bound in (("min", low), ("max", high))
    ]
    return x if bounds == [None, None] else x.clamp(*bounds)


def _reshape(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, shape = (*inputs, None)[:2]
    assert x is not None
    sizes = attributes["shape"] if shape is None else _values(shape)
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(attributes: Attributes, inputs: Inputs) -> Tensor:
    (x,) = inputs
    assert x is not None
    axis = attributes.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _axes(attributes: Attributes, inputs: Inputs) -> list[int]:
    return (
        _values(inputs[1])
        if len(inputs) > 1 and inputs[1] is not None
        else list(attributes.get("axes", []))
    )


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(attributes: Attributes, inputs: Inputs) -> Tensor:
        x, axes = inputs[0], _axes(attributes, inputs)
        assert x is not None
        return function(
            x, dim=axes or list(range(x.dim())), keepdim=bool(attributes.get("keepdims", 1))
        )

    return run


def _squeeze(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, axes = inputs[0], _axes(attributes, inputs)
    assert x is not None
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _unsqueeze(attributes: Attributes, inputs: Inputs) -> Tensor:
    x = inputs[0]
    assert x is not None
    for axis in sorted(_axes(attributes, inputs)):
        x = x.unsqueeze(axis)
    return x


def _slice(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, starts, ends, axes, steps = (*inputs, None, None, None, None)[:5]
    assert x is not None
    begin = _values(starts) if starts is not None else attributes["starts"]
    end = _values(ends) if ends is not None else attributes["ends"]
    along = _values(axes) or attributes.get("axes") or range(len(begin))
    if any(step != 1 for step in _values(steps)):
        raise UnsupportedError("Slice with steps")
    for axis, first, last in zip(along, begin, end, strict=True):
        x = x.narrow(axis, *_range(x.shape[axis], first, last))
    return x


def _range(size: int, first: int, last: int) -> tuple[int, int]:
    first, last = (min(max(end + size if end < 0 else end, 0), size) for end in (first, last))
    return first, max(last - first, 0)


def _gather(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, index = inputs
    assert x is not None and index is not None
    axis = attributes.get("axis", 0) % x.dim()
    chosen = x.index_select(axis, index.flatten().to(x.device) % x.shape[axis])
    return chosen.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _pad(attributes: Attributes, inputs: Inputs) -> Tensor:
    x, pads, value, axes = (*inputs, None, None, None)[:4]
    assert x is not None
    sizes = attributes["pads"] if pads is None else _values(pads)
    if axes is not None or attributes.get("mode", "constant") != "constant":
        raise UnsupportedError(f"Pad with mode {attributes.get('mode', 'constant')} or axes")
    both = [(sizes[axis], sizes[axis + x.dim()]) for axis in range(x.dim())]
    return F.pad(
        x,
        [pad for pair in reversed(both) for pad in pair],
        value=attributes.get("value", 0.0) if value is None else float(value),
    )


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def run(attributes: Attributes, inputs: Inputs) -> Tensor:
        (x,) = inputs
        assert x is not None
        axis = attributes.get("axis", -1)
        if axis not in (-1, x.dim() - 1) and math.prod(x.shape[axis + 1 :]) != 1:
            raise UnsupportedError("Softmax over several axes")
        return function(x, dim=axis)

    return run


def _apply(function: Callable[..., Tensor]) -> Operator:
    """An operator without attributes."""
    return lambda attributes, inputs: function(*inputs)


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(attributes: Attributes, inputs: Inputs) -> Tensor:
        first, *others = (x for x in inputs if x is not None)
        for other in others:
            first = function(first, other)
        return first

    return run


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _of_one(function: Callable[[Tensor, Attributes], Any]) -> Operator:
    """An operator of one input and its attributes."""

    def run(attributes: Attributes, inputs: Inputs) -> Any:
        x = inputs[0]
        assert x is not None
        return function(x, attributes)

    return run


def _transpose(x: Tensor, attributes: Attributes) -> Tensor:
    return x.permute(attributes.get("perm") or tuple(reversed(range(x.dim()))))


def _hard_sigmoid(x: Tensor, attributes: Attributes) -> Tensor:
    slope, shift = float(attributes.get("alpha", 0.2)), float(attributes.get("beta", 0.5))
    return (slope * x + shift).clamp(0, 1)


def _concat(attributes: Attributes, inputs: Inputs) -> Tensor:
    return torch.cat([x for x in inputs if x is not None], attributes["axis"])


OPERATORS: dict[str, Operator] = {
    "Abs": _apply(torch.abs),
    "Add": _apply(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _of_one(lambda x, attributes: x.to(TYPES[attributes["to"]])),
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _apply(_divide),
    "Dropout": _of_one(lambda x, attributes: x),
    "Elu": _of_one(lambda x, attributes: F.elu(x, attributes.get("alpha", 1.0))),
    "Erf": _apply(torch.erf),
    "Exp": _apply(torch.exp),
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": _of_one(
        lambda x, attributes: F.gelu(x, approximate=attributes.get("approximate", "none"))
    ),
    "Gemm": _gemm,
    "GlobalAveragePool": _of_one(lambda x, attributes: x.mean((2, 3), keepdim=True)),
    "GlobalMaxPool": _of_one(lambda x, attributes: x.amax((2, 3), keepdim=True)),
    "HardSigmoid": _of_one(_hard_sigmoid),
    "HardSwish": _apply(F.hardswish),
    "Identity": _of_one(lambda x, attributes: x),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _of_one(lambda x, attributes: F.leaky_relu(x, attributes.get("alpha", 0.01))),
    "Log": _apply(torch.log),
    "LogSoftmax": _softmax(F.log_softmax),
    "MatMul": _apply(torch.matmul),
    "Max": _fold(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _fold(torch.minimum),
    "Mul": _apply(torch.mul),
    "Neg": _apply(torch.neg),
    "Pad": _pad,
    "Pow": _apply(torch.pow),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _apply(F.relu),
    "Reshape": _reshape,
    "Shape": _of_one(lambda x, attributes: torch.tensor(x.shape)),
    "Sigmoid": _apply(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax(F.softmax),
    "Softplus": _apply(F.softplus),
    "Sqrt": _apply(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _apply(torch.sub),
    "Sum": _fold(torch.add),
    "Tanh": _apply(torch.tanh),
    "Transpose": _of_one(_transpose),
    "Unsqueeze": _unsqueeze,
}
