"""The family of rules: against the written formulas, at both ends, and their gradients."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.local_smoothing.smoothing import (
    RULES,
    SPACES,
    TRUSTS,
    BinarySmoothing,
    SmoothedClassifier,
    log_strength,
)
from equipoise.mixing import MixedClassifier
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6
FAMILY = list(product(TRUSTS, SPACES, RULES))


def _images() -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _base(seed: int, classes: int = K) -> nn.Module:
    base = build("cnn_small", num_classes=classes, image_shape=(C, H, W), seed=seed).double().eval()
    return base.requires_grad_(False)


def _loop(values: nn.Module, x: Tensor, space: str) -> tuple[Tensor, Tensor]:
    """Values and ‖∇·‖₁, class by class."""
    sizes = []
    for number in range(K):
        point = x.clone().requires_grad_()
        z = values(point)
        out = z if space == "logits" else z.softmax(dim=1)
        sizes.append(
            torch.autograd.grad(out[:, number].sum(), point)[0].flatten(1).abs().sum(dim=1)
        )
    return (values(x) if space == "logits" else values(x).softmax(dim=1)), torch.stack(sizes, dim=1)


@pytest.mark.parametrize(("trust", "space", "rule"), FAMILY)
def test_every_rule_is_its_formula(trust: str, space: str, rule: str) -> None:
    x, accurate, robust, gamma = _images(), _base(1), _base(2), 0.7
    (g, steep), (h, other) = _loop(accurate, x, space), _loop(robust, x, space)
    first = steep.gather(1, g.argmax(dim=1, keepdim=True))
    second = other.gather(1, h.argmax(dim=1, keepdim=True))
    r = {
        "constant": torch.ones_like(g),
        "gradient": steep,
        "top-gradient": first.expand_as(g),
        "ratio": steep / (other + 1e-5),
        "top-ratio": (first / (second + 1e-5)).expand_as(g),
    }[trust]
    expected = g + gamma * r * h
    if rule == "averaged":
        expected = expected / (1 + gamma * r)
    model = SmoothedClassifier(accurate, robust, gamma, trust=trust, space=space, rule=rule)
    torch.testing.assert_close(model(x), expected if space == "logits" else expected.log())


@pytest.mark.parametrize(("trust", "space"), list(product(TRUSTS, SPACES)))
def test_the_ends_are_the_bases(trust: str, space: str) -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    for gamma, base in ((0.0, accurate), (math.inf, robust)):
        point = x.clone().requires_grad_()
        result = SmoothedClassifier(accurate, robust, gamma, trust=trust, space=space)(point)
        expected = base(x) if space == "logits" else F.log_softmax(base(x), dim=1)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
        assert torch.isfinite(torch.autograd.grad(result.sum(), point)[0]).all()


def test_a_constant_accurate_side_is_kept_for_any_finite_strength() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(K, dtype=x.dtype).expand(len(x), K) + 0 * x.sum()

    model = SmoothedClassifier(Flat(), _base(2), 1e6, trust="gradient")
    torch.testing.assert_close(model(_images()), torch.arange(K, dtype=torch.float64).expand(B, K))
    x = _images().requires_grad_()
    assert torch.isfinite(torch.autograd.grad(model(x).sum(), x)[0]).all()


def test_constant_trust_over_probabilities_is_the_mixture() -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    result = SmoothedClassifier(accurate, robust, 3.0, space="probabilities")(x)
    torch.testing.assert_close(result, MixedClassifier(accurate, robust, 0.75)(x))


def test_each_image_can_have_its_own_strength() -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    model = SmoothedClassifier(accurate, robust, 1.0, trust="ratio")
    gammas = torch.tensor([0.0, 0.5, 8.0, math.inf])
    result = model.forward_with_gate(x, log_strength(gammas))
    for row, gamma in enumerate(gammas.tolist()):
        alone = SmoothedClassifier(accurate, robust, gamma, trust="ratio")(x[row : row + 1])
        torch.testing.assert_close(result[row : row + 1], alone)


@pytest.mark.parametrize(("trust", "space"), list(product(TRUSTS, SPACES)))
def test_gradients_are_right_to_second_order(trust: str, space: str) -> None:
    generator = torch.Generator().manual_seed(4)
    smooth = [
        nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        for _ in range(2)
    ]
    for base in smooth:
        for weight in base.parameters():
            nn.init.normal_(weight, std=0.4, generator=generator)
    model = SmoothedClassifier(
        smooth[0], smooth[1], 0.6, trust=trust, space=space, norm="l2"
    ).requires_grad_(False)
    x = torch.rand(2, 3, 2, 2, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))


class _Plane(nn.Module):
    """Two classes separated by wᵀx = 0.3, with logits ±(wᵀx − 0.3)/2."""

    def forward(self, x: Tensor) -> Tensor:
        w = torch.linspace(-1, 1, C * H * W, dtype=x.dtype)
        g = (x.flatten(1) @ w - 0.3) / 2
        return torch.stack((-g, g), dim=1)


class _ConstantClass(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return F.one_hot(torch.full((len(x),), self.number), 2).to(x.dtype)


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 2), (1.0, math.inf)])
def test_binary_smoothing_shifts_a_linear_classifier_by_its_radius(
    norm: str | float, order: float
) -> None:
    """γ ‖w‖_p* is exactly how much a perturbation of size γ can change wᵀx."""
    x, gamma = _images(), 0.05
    w = torch.linspace(-1, 1, C * H * W, dtype=torch.float64)
    g = x.flatten(1) @ w - 0.3
    for number, direction in ((0, -1.0), (1, 1.0)):
        z = BinarySmoothing(_Plane(), _ConstantClass(number), gamma, norm=norm)(x)
        torch.testing.assert_close(
            z[:, 1] - z[:, 0], g + gamma * direction * torch.linalg.vector_norm(w, order)
        )


def test_invalid_arguments_of_rules_are_an_error() -> None:
    g, h = _base(1), _base(2)
    with pytest.raises(InputError, match="did you mean 'ratio'"):
        SmoothedClassifier(g, h, 1.0, trust="ration")
    with pytest.raises(InputError, match="gamma"):
        SmoothedClassifier(g, h, -1.0)
    with pytest.raises(InputError, match="finite"):
        SmoothedClassifier(g, h, math.inf, rule="added")
    with pytest.raises(InputError, match="equal numbers of classes"):
        SmoothedClassifier(g, _base(2, classes=5), 1.0)(_images())
    with pytest.raises(InputError, match="two classes"):
        BinarySmoothing(g, h, 1.0)(_images())
    for bad in ("1", math.nan, None):
        for make in (SmoothedClassifier, BinarySmoothing):
            with pytest.raises(InputError, match="`gamma` must"):
                make(g, h, bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`norm` must"):
        SmoothedClassifier(g, h, 1.0, norm=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`chunk` must be a whole number of at least 1"):
        SmoothedClassifier(g, h, 1.0, chunk=0)


@pytest.mark.parametrize("trust", ["gradient", "top-ratio"])
def test_a_base_in_training_mode_is_an_error(trust: str) -> None:
    training = nn.Sequential(
        nn.Conv2d(C, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * H * W, K)
    ).double()
    with pytest.raises(InputError, match=r"evaluation mode, model\.eval\(\)"):
        SmoothedClassifier(training, _base(2), 1.0, trust=trust)(_images())
    assert SmoothedClassifier(training.eval(), _base(2), 1.0, trust=trust)(_images()).shape == (
        B,
        K,
    )
