"""The gradient source: precision, blocks, and the memory of recorded passes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from attack_models import BatchSizeDependent, HardDecision
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise.attacks import gradients
from equipoise.attacks.cuda_graphs import CudaGraphFunction
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.straight_through import straight_through
from equipoise.core import losses
from equipoise.core.checks import InputError
from equipoise.core.rng import stream


def _images(count: int = 8) -> Tensor:
    return torch.rand(count, 3, 5, 7, generator=generator(0))


class FirstPixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :6]


class WrongInBf16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :6] * (1 if not torch.is_autocast_enabled("cpu") else -1)


def test_reduced_precision_must_suit_model_and_surrogate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.core.device.has_bf16", lambda kind: True)

    def reduced(model: nn.Module, surrogate: nn.Module) -> bool:
        return GradientSource(model, GradientSettings(surrogate), "bf16", _images()).bf16_gradients

    assert reduced(FirstPixels(), FirstPixels())
    assert not reduced(FirstPixels(), WrongInBf16())
    assert not reduced(WrongInBf16(), FirstPixels())


def test_value_gradient_and_margin_of_a_linear_model(linear: Linear) -> None:
    x, y = _images().double(), torch.arange(8) % 6
    source = GradientSource(
        linear, GradientSettings(extra=lambda z: 2 * z.flatten(1).sum(1)), "fp32", x
    )
    own_logit = source.value_and_gradient(
        "own logit", lambda z, y, target: z.gather(1, y.view(-1, 1))[:, 0]
    )
    value, gradient, logit_margin, margin = own_logit(x, y, y)
    own = linear(x).gather(1, y.view(-1, 1)).squeeze(1)
    torch.testing.assert_close(value, (own + 2 * x.flatten(1).sum(1)).detach())
    torch.testing.assert_close(gradient.flatten(1), (linear.weight[y] + 2).detach())
    torch.testing.assert_close(logit_margin, losses.signed_margin(linear(x), y).detach())
    torch.testing.assert_close(margin, losses.probability_margin(linear(x), y).detach())


def test_blocks_have_one_size() -> None:
    model = BatchSizeDependent().eval()
    x, y = _images(12), torch.zeros(12, dtype=torch.int64)
    source = GradientSource(model, GradientSettings(), "fp32", x).in_blocks(4)
    model.batch_sizes.clear()
    source.judge(x, y)
    source.margins()(x, y)
    source.value_and_gradient("ce", lambda z, y, target: losses.cross_entropy(z, y))(x, y, y)
    assert model.batch_sizes == [4] * 9


def test_one_recorded_pass_serves_all_blocks(
    linear: Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    class Recorded(CudaGraphFunction):
        def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            recorded.append(len(inputs[0]))
            return super().__call__(*inputs)

    monkeypatch.setattr(gradients, "CudaGraphFunction", Recorded)
    x, y = _images(12).double(), torch.arange(12) % 6
    source = GradientSource(linear, GradientSettings(), "fp32", x)
    whole, blocks = (
        own.value_and_gradient("ce", lambda z, y, target: losses.cross_entropy(z, y))(x, y, y)
        for own in (source, source.in_blocks(4))
    )
    assert recorded == [12, 4, 4, 4]
    for ours, expected in zip(blocks, whole, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_source_with_other_blocks_frees_recorded_passes() -> None:
    source = GradientSource(FirstPixels(), GradientSettings(), "fp32", _images())
    recorded = weakref.ref(source.margins())
    source = source.in_blocks(4)
    gc.collect()
    assert recorded() is None and source.margins() is source.margins()


def test_numbers_about_an_image_are_computed_once(linear: Linear) -> None:
    source = GradientSource(linear, GradientSettings(), "fp32", _images().double())
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(1)
        return torch.tensor([[1, 2], [3, 4]])

    index = torch.tensor([70, 50])
    assert source.once_per_image("order", index, compute).tolist() == [[1, 2], [3, 4]]
    assert source.once_per_image("order", index.flip(0), compute).tolist() == [[3, 4], [1, 2]]
    assert len(calls) == 1
    assert source.once_per_image("other", index, compute).tolist() == [[1, 2], [3, 4]]
    assert len(calls) == 2


def test_follow_is_model_or_surrogate() -> None:
    with pytest.raises(InputError, match="`follow` must be one of model, surrogate"):
        GradientSettings(follow="both")


def test_logits_are_exact_and_gradients_those_of_the_surrogate(linear: Linear) -> None:
    hard = HardDecision(linear)
    model = straight_through(hard, linear)
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double().requires_grad_()
    assert torch.equal(model(x), hard(x))
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient = torch.autograd.grad((model(x).exp() * weights).sum(), x)[0]
    expected = torch.autograd.grad((linear(x) * weights * hard(x).exp()).sum(), x)[0]
    torch.testing.assert_close(gradient, expected)


def test_attacks_of_other_libraries_break_a_model_without_gradients(linear: Linear) -> None:
    """Plain signed gradient steps, as any library makes them."""
    hard = HardDecision(linear)
    model = straight_through(hard, linear)
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7, low=0.4, high=0.6).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    point = x.clone()
    for _ in range(20):
        point.requires_grad_()
        loss = nn.functional.cross_entropy(model(point).nan_to_num(neginf=-10.0), y)
        point = (point.detach() + 0.01 * torch.autograd.grad(loss, point)[0].sign()).clamp(0, 1)
    with torch.no_grad():
        assert bool((hard(point).argmax(dim=1) != y).all())
