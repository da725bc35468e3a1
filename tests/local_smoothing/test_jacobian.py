"""Norms of gradients: against a loop over classes, in every norm, and differentiable."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.local_smoothing.jacobian import (
    SoftplusDerivatives,
    SoftplusSurrogate,
    class_gradient_norms,
)
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6


def _images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(1), dtype=dtype)


def _model() -> nn.Module:
    return (
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=3)
        .eval()
        .requires_grad_(False)
    )


@pytest.mark.parametrize(
    ("norm", "order"), [("linf", 1.0), ("l2", 2.0), (1.0, math.inf), (4.0, 4 / 3)]
)
def test_norms_equal_those_of_a_loop_over_classes(norm: str | float, order: float) -> None:
    model, x = _model(), _images()
    values, norms, _ = class_gradient_norms(lambda at: (model(at), ()), x, norm, chunk=4)
    for number in range(K):
        point = x.clone().requires_grad_()
        gradient = torch.autograd.grad(model(point)[:, number].sum(), point)[0].flatten(1)
        torch.testing.assert_close(
            norms[:, number], torch.linalg.vector_norm(gradient, order, dim=1)
        )
    torch.testing.assert_close(values, model(x))
    again, norm_of_top, _ = class_gradient_norms(lambda at: (model(at), ()), x, norm, top_only=True)
    torch.testing.assert_close(norm_of_top, norms.gather(1, values.argmax(dim=1, keepdim=True)))
    assert torch.equal(again, values)


def test_other_outputs_keep_their_gradients() -> None:
    model, x = _model(), _images().requires_grad_()
    _, _, squares = class_gradient_norms(lambda at: (model(at), at.square()), x, "l2")
    torch.testing.assert_close(torch.autograd.grad(squares.sum(), x)[0], 2 * x)


class _Quadratic(nn.Module):
    """f_k = s_k ‖x − c_k‖² / 2: ‖∇f_k‖₂ = |s_k| ‖x − c_k‖, whose own gradient is known too."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.centres = torch.rand(K, C * H * W, generator=generator, dtype=torch.float64)
        self.scales = torch.randn(K, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.scales * (x.flatten(1).unsqueeze(1) - self.centres).square().sum(dim=2) / 2


def test_second_derivatives_in_closed_form() -> None:
    model, x = _Quadratic(), _images(torch.float64).requires_grad_()
    _, norms, _ = class_gradient_norms(lambda at: (model(at), ()), x, "l2")
    offset = x.flatten(1).unsqueeze(1) - model.centres
    length = offset.norm(dim=2)
    torch.testing.assert_close(norms, model.scales.abs() * length)
    gradient = torch.autograd.grad(norms.sum(), x)[0].flatten(1)
    torch.testing.assert_close(
        gradient, (model.scales.abs()[:, None] * offset / length.unsqueeze(2)).sum(dim=1)
    )


def test_gradient_norms_of_relu_networks_are_differentiable_with_softplus_derivatives() -> None:
    model, x = _model(), _images().requires_grad_()
    _, hard, _ = class_gradient_norms(lambda at: (model(at), ()), x, "linf")
    assert torch.autograd.grad(hard.sum(), x)[0].abs().max() == 0
    with SoftplusDerivatives():
        values, soft, _ = class_gradient_norms(lambda at: (model(at), ()), x, "linf")
    assert torch.autograd.grad(soft.sum(), x)[0].abs().max() > 0
    torch.testing.assert_close(values, model(x))
    torch.testing.assert_close(SoftplusSurrogate(model)(x), model(x))
    with SoftplusDerivatives(1e4):  # for large sharpness it approaches the network itself
        _, sharp, _ = class_gradient_norms(lambda at: (model(at), ()), x, "linf")
    assert (sharp - hard).abs().max() < (soft - hard).abs().max()


def test_without_second_derivatives_nothing_is_recorded() -> None:
    model, x = _model(), _images().requires_grad_()
    values, norms, _ = class_gradient_norms(lambda at: (model(at), ()), x, "linf", attached=False)
    assert values.requires_grad and not norms.requires_grad
