"""The operators of ONNX in torch, against torch's own layers; neither onnx nor onnxruntime is
needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.sources.black_box import ImageInput
from equipoise.models.sources.onnx_model import OnnxGraph, Step
from equipoise.models.sources.onnx_operators import OPERATORS, UnsupportedError

X = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1))
V = torch.rand(3, generator=torch.Generator().manual_seed(2)) + 0.5


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


CASES: list[tuple[str, dict[str, Any], list[Tensor | None], Callable[[], Tensor]]] = [
    (
        "Conv",
        {"pads": [1, 0, 2, 1], "strides": [2, 1]},
        [X, W],
        lambda: F.conv2d(F.pad(X, (0, 1, 1, 2)), W, None, (2, 1)),
    ),
    (
        "Conv",
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        [X, W],
        lambda: F.conv2d(F.pad(X, (1, 1, 1, 1)), W, None, 2),
    ),
    (
        "Conv",
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        [F.pad(X, (0, 1)), W],
        lambda: F.conv2d(F.pad(X, (1, 1, 1, 1)), W, None, 2),
    ),
    ("Conv", {"group": 3}, [X, W[:3, :1]], lambda: F.conv2d(X, W[:3, :1], groups=3)),
    (
        "MaxPool",
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]},
        [-X.abs()],
        lambda: F.max_pool2d(F.pad(-X.abs(), (0, 1, 0, 1), value=-math.inf), 3, 2),
    ),
    (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        [X],
        lambda: F.avg_pool2d(X, 3, 1, 1, count_include_pad=False),
    ),
    (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        [X],
        lambda: F.avg_pool2d(X, 3, 1, 1),
    ),
    (
        "BatchNormalization",
        {"epsilon": 1e-3},
        [X, V, V, V, V],
        lambda: F.batch_norm(X, V, V, V, V, eps=1e-3),
    ),
    ("LayerNormalization", {"axis": -1}, [X, torch.ones(9)], lambda: F.layer_norm(X, (9,))),
    (
        "Gemm",
        {"alpha": 2.0, "beta": 0.5, "transB": 1},
        [X[0, 0], W.flatten(1)[:, :9], torch.ones(4)],
        lambda: 2 * X[0, 0] @ W.flatten(1)[:, :9].T + 0.5,
    ),
    ("Clip", {}, [X, torch.tensor(-0.5), torch.tensor(0.25)], lambda: X.clamp(-0.5, 0.25)),
    ("Clip", {"max": 0.0}, [X], lambda: X.clamp(max=0)),
    ("Reshape", {}, [X, ints(0, -1)], lambda: X.flatten(1)),
    ("Flatten", {"axis": 2}, [X], lambda: X.reshape(6, 63)),
    ("Transpose", {"perm": [0, 3, 1, 2]}, [X], lambda: X.permute(0, 3, 1, 2)),
    ("ReduceMean", {"axes": [2, 3], "keepdims": 0}, [X], lambda: X.mean((2, 3))),
    ("ReduceSum", {}, [X, ints(1)], lambda: X.sum(1, keepdim=True)),
    ("Squeeze", {}, [X[:1], ints(0)], lambda: X[0]),
    ("Unsqueeze", {"axes": [0, 3]}, [X[0]], lambda: X[0][None, :, :, None]),
    ("Slice", {}, [X, ints(1, -3), ints(100, 8), ints(2, 3)], lambda: X[:, :, 1:, -3:8]),
    ("Gather", {"axis": 1}, [X, ints(2, -3)], lambda: X[:, [2, 0]]),
    ("Gather", {}, [ints(5, 6, 7), torch.tensor(1)], lambda: torch.tensor(6)),
    ("Concat", {"axis": 1}, [X, X], lambda: torch.cat([X, X], 1)),
    (
        "Pad",
        {},
        [X, ints(0, 0, 1, 2, 0, 0, 3, 4), torch.tensor(0.5)],
        lambda: F.pad(X, (2, 4, 1, 3), value=0.5),
    ),
    ("Softmax", {}, [X], lambda: X.softmax(3)),
    ("Softmax", {"axis": 1}, [X[:, :, :1, :1]], lambda: X[:, :, :1, :1].softmax(1)),
    ("HardSigmoid", {"alpha": 1 / 6}, [X * 4], lambda: F.hardsigmoid(X * 4)),
    ("Sum", {}, [X, X, X], lambda: 3 * X),
    ("Max", {}, [X, -X], lambda: X.abs()),
    ("Div", {}, [ints(7), ints(2)], lambda: ints(3)),
    ("Cast", {"to": 7}, [X], lambda: X.long()),
    ("Gelu", {"approximate": "tanh"}, [X], lambda: F.gelu(X, approximate="tanh")),
    ("LeakyRelu", {"alpha": 0.3}, [X], lambda: F.leaky_relu(X, 0.3)),
    ("Elu", {}, [X], lambda: F.elu(X)),
    ("Shape", {}, [X], lambda: ints(2, 3, 7, 9)),
    ("GlobalMaxPool", {}, [X], lambda: X.amax((2, 3), keepdim=True)),
    ("GlobalAveragePool", {}, [X], lambda: X.mean((2, 3), keepdim=True)),
    ("Dropout", {}, [X, None, None], lambda: X),
    ("Erf", {}, [X], lambda: X.erf()),
]


@pytest.mark.parametrize(
    ("operator", "attributes", "inputs", "expected"), CASES, ids=[case[0] for case in CASES]
)
def test_operators(
    operator: str,
    attributes: dict[str, Any],
    inputs: list[Tensor | None],
    expected: Callable[[], Tensor],
) -> None:
    found, wanted = OPERATORS[operator](attributes, inputs), expected()
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "attributes", "inputs"),
    [
        ("Conv", {}, [X[:, :, 0], W[..., 0]]),
        ("Pad", {"mode": "reflect", "pads": [0] * 8}, [X]),
        ("AveragePool", {"kernel_shape": [2, 2], "ceil_mode": 1}, [X]),
        ("Softmax", {"axis": 1}, [X]),
        ("Slice", {}, [X, ints(0), ints(3), ints(2), ints(2)]),
    ],
)
def test_what_is_not_implemented_says_so(
    operator: str, attributes: dict[str, Any], inputs: list[Tensor | None]
) -> None:
    with pytest.raises(UnsupportedError):
        OPERATORS[operator](attributes, inputs)


@pytest.mark.parametrize(
    ("channels_last", "batch"), [(False, None), (True, None), (False, 4), (True, 1)]
)
def test_a_graph_has_the_gradients_of_its_network(channels_last: bool, batch: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(175, 4)).eval()
    sizes = (batch, 7, 9, 3) if channels_last else (batch, 3, 7, 9)
    steps = (
        [Step("Transpose", ("images",), ("nchw",), {"perm": [0, 3, 1, 2]})] if channels_last else []
    )
    steps += [
        Step("Conv", ("nchw" if channels_last else "images", "w", "b"), ("a",), {}),
        Step("Relu", ("a",), ("r",), {}),
        Step("Reshape", ("r", "shape"), ("flat",), {}),
        Step("Gemm", ("flat", "fw", "fb"), ("logits",), {"transB": 1}),
        Step("Softmax", ("logits",), ("out",), {}),
    ]
    constants = {
        "w": net[0].weight.data,
        "b": net[0].bias.data,
        "shape": ints(0 if batch is None else batch, -1),
        "fw": net[3].weight.data,
        "fb": net[3].bias.data,
    }
    graph = OnnxGraph(
        ImageInput.of("images", sizes, is_bytes=False),
        steps,
        constants,  # type: ignore[arg-type]
        "out",
        b"digest",
    )
    x, y = (
        torch.cat([X, X * 2, X - 1]).requires_grad_(),
        torch.cat([X, X * 2, X - 1]).requires_grad_(),
    )
    torch.testing.assert_close(
        graph(x), net(y).log_softmax(1)
    )  # the last softmax becomes its logarithm
    graph(x)[:, 1].sum().backward()
    net(y).log_softmax(1)[:, 1].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
