"""Sizes of gradients: against a loop over classes, in every norm, and differentiable once more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.local_smoothing.jacobian import Softened, dual, each, softened, top
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6


def _images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(1), dtype=dtype)


def _model() -> nn.Module:
    return build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=3).eval().requires_grad_(False)


@pytest.mark.parametrize(("norm", "order"), [("linf", 1.0), ("l2", 2.0), (1.0, math.inf), (4.0, 4 / 3)])
def test_sizes_are_those_of_a_loop_over_classes(norm: str | float, order: float) -> None:
    model, x = _model(), _images()
    values, sizes, _ = each(lambda at: (model(at), ()), x, norm, chunk=4)
    for number in range(K):
        point = x.clone().requires_grad_()
        gradient = torch.autograd.grad(model(point)[:, number].sum(), point)[0].flatten(1)
        torch.testing.assert_close(sizes[:, number], torch.linalg.vector_norm(gradient, order, dim=1))
    torch.testing.assert_close(values, model(x))
    most, size, _ = top(lambda at: (model(at), ()), x, norm)
    torch.testing.assert_close(size, sizes.gather(1, values.argmax(dim=1, keepdim=True)))
    assert torch.equal(most, values)


def test_dual_norms() -> None:
    assert dual("linf") == 1 and dual("l2") == 2 and dual(1) == math.inf and dual(math.inf) == 1
    for bad in (0.5, "l1"):
        with pytest.raises(InputError, match="norm"):
            dual(bad)


def test_other_tensors_ride_along_with_their_gradients() -> None:
    model, x = _model(), _images().requires_grad_()
    _, _, seen = each(lambda at: (model(at), at.square()), x, "l2")
    torch.testing.assert_close(torch.autograd.grad(seen.sum(), x)[0], 2 * x)


class _Quadratic(nn.Module):
    """f_k = s_k ‖x − c_k‖² / 2: ‖∇f_k‖₂ = |s_k| ‖x − c_k‖, whose own gradient is known too."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(5)
        self.centres = torch.rand(K, C * H * W, generator=chance, dtype=torch.float64)
        self.scales = torch.randn(K, generator=chance, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.scales * (x.flatten(1).unsqueeze(1) - self.centres).square().sum(dim=2) / 2


def test_second_derivatives_in_closed_form() -> None:
    model, x = _Quadratic(), _images(torch.float64).requires_grad_()
    _, sizes, _ = each(lambda at: (model(at), ()), x, "l2")
    away = x.flatten(1).unsqueeze(1) - model.centres
    length = away.norm(dim=2)
    torch.testing.assert_close(sizes, model.scales.abs() * length)
    slope = torch.autograd.grad(sizes.sum(), x)[0].flatten(1)
    torch.testing.assert_close(slope, (model.scales.abs()[:, None] * away / length.unsqueeze(2)).sum(dim=1))


def test_relu_networks_hide_the_slope_of_their_steepness_and_softening_shows_it() -> None:
    model, x = _model(), _images().requires_grad_()
    _, hard, _ = each(lambda at: (model(at), ()), x, "linf")
    assert torch.autograd.grad(hard.sum(), x)[0].abs().max() == 0
    with softened():
        values, soft, _ = each(lambda at: (model(at), ()), x, "linf")
    assert torch.autograd.grad(soft.sum(), x)[0].abs().max() > 0
    torch.testing.assert_close(values, model(x))
    torch.testing.assert_close(Softened(model)(x), model(x))
    with softened(1e4):  # sharper and sharper it becomes the network itself
        _, sharp, _ = each(lambda at: (model(at), ()), x, "linf")
    assert (sharp - hard).abs().max() < (soft - hard).abs().max()


def test_without_second_derivatives_nothing_is_recorded() -> None:
    model, x = _model(), _images().requires_grad_()
    values, sizes, _ = each(lambda at: (model(at), ()), x, "linf", attached=False)
    assert values.requires_grad and not sizes.requires_grad
