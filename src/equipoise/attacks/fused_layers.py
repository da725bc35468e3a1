"""Layers of the faster copies of a network: a convolution with its ReLU as one cuDNN kernel, and
their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """A 1×1 convolution with a stride on every stride-th pixel alone; the gradient flows to the
    images.

    For some shapes cuDNN takes a slow kernel for the stride.
    """

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", conv.weight.detach().to(dtype))
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach().to(dtype))
        self.stride = conv.stride

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C', ⌈H / stride⌉, ⌈W / stride⌉)."""
        weight, bias = self.get_buffer("weight"), self._buffers["bias"]
        out: Tensor = _Projection.apply(x.to(weight.dtype), weight, self.stride)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.view(-1, 1, 1)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        pixels = x[:, :, :: stride[0], :: stride[1]]
        return F.conv2d(pixels.contiguous(memory_format=torch.channels_last), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            _gradient_to_input(gradients[0].to(x.dtype), x, weight, (ctx.stride, (0, 0), (1, 1))),
            None,
            None,
        )


class ConvReLU(nn.Module):
    """relu(conv(x) + z) with weights of one precision; gradients flow to x and z, not to the
    weights.

    For two `readers` the result is returned twice.
    """

    readers = 1

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        bias = conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
        self.register_buffer("weight", conv.weight.detach().to(dtype))
        self.register_buffer("bias", bias.to(dtype))
        self.settings: tuple[Any, ...] = (conv.stride, conv.padding, conv.dilation)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """(B, C, H, W) → (B, C', H', W'); z has the shape of the result."""
        weight, bias = self.get_buffer("weight"), self.get_buffer("bias")
        x, z = x.to(weight.dtype), None if z is None else z.to(weight.dtype)
        if x.is_cuda:
            outputs: tuple[Tensor, ...] = _CudnnConvReLU.apply(  # type: ignore[no-untyped-call]
                x, z, weight, bias, self.settings, self.readers
            )
        else:
            sums = F.conv2d(x, weight, bias, *self.settings)
            outputs = (F.relu(sums if z is None else sums + z),) * self.readers
        return outputs if self.readers > 1 else outputs[0]


class _CudnnConvReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        settings: tuple[Any, ...],
        readers: int,
    ) -> Any:
        if z is None:
            out = torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *settings, 1)
        else:
            out = torch.ops.aten.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *settings, 1)
        ctx.save_for_backward(x, weight, out)
        ctx.settings, ctx.has_z = settings, z is not None
        return (out, *(out.detach() for _ in range(readers - 1)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        if len(gradients) == 2:
            add, (first, second) = masked_sum(), (part.to(out.dtype) for part in gradients)
            assert add is not None
            gradient = add(first, second, out)
        else:
            gradient = torch.ops.aten.threshold_backward(gradients[0].to(out.dtype), out, 0)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = _gradient_to_input(gradient, x, weight, ctx.settings)
        return to_x, gradient if ctx.has_z else None, None, None, None, None


@cache
def masked_sum() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """a, b, out → a + b where out > 0, else 0: the gradient of a ReLU with two readers in one
    kernel, if it compiles."""
    code = (
        "template <typename T> T masked_sum(T a, T b, T out) { return out > T(0) ? a + b : T(0); }"
    )
    try:
        kernel: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.cuda.jiterator._create_jit_fn(
            code
        )
        a, b, out = torch.tensor(
            [[1.5, 2, -3], [0.25, -4, 5], [1, 0, 2]], dtype=torch.bfloat16, device="cuda"
        )
        return kernel if kernel(a, b, out).tolist() == [1.75, 0, 2] else None
    except Exception:  # without CUDA, or without its compiler at run time
        return None


def _gradient_to_input(
    gradient: Tensor, x: Tensor, weight: Tensor, settings: tuple[Any, ...]
) -> Tensor:
    gradients = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, *settings, False, (0, 0), 1, (True, False, False)
    )
    to_x: Tensor = gradients[0]
    return to_x
