"""The family of rules: against the written formulas, at both ends, and under attack."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks.registry import named
from equipoise.core import losses, rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.policy import AdaptiveSmoothing
from equipoise.local_smoothing.smoothing import (
    RULES,
    SPACES,
    TRUSTS,
    BinarySmoothing,
    SmoothedClassifier,
    biased,
    gate_of,
)
from equipoise.mixing.classifier import MixedClassifier
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6
FAMILY = list(product(TRUSTS, SPACES, RULES))


def _images() -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _base(seed: int, classes: int = K) -> nn.Module:
    base = build("cnn_small", num_classes=classes, image_shape=(C, H, W), seed=seed).double().eval()
    return base.requires_grad_(False)


def _loop(values: nn.Module, x: Tensor, space: str) -> tuple[Tensor, Tensor]:
    """Values and ‖∇·‖₁ class by class, as one would write it down."""
    sizes = []
    for number in range(K):
        point = x.clone().requires_grad_()
        z = values(point)
        out = z if space == "logits" else z.softmax(dim=1)
        sizes.append(torch.autograd.grad(out[:, number].sum(), point)[0].flatten(1).abs().sum(dim=1))
    return (values(x) if space == "logits" else values(x).softmax(dim=1)), torch.stack(sizes, dim=1)


@pytest.mark.parametrize(("trust", "space", "rule"), FAMILY)
def test_every_rule_is_its_formula(trust: str, space: str, rule: str) -> None:
    x, accurate, robust, gamma = _images(), _base(1), _base(2), 0.7
    (g, steep), (h, other) = _loop(accurate, x, space), _loop(robust, x, space)
    first = steep.gather(1, g.argmax(dim=1, keepdim=True))
    second = other.gather(1, h.argmax(dim=1, keepdim=True))
    r = {"constant": torch.ones_like(g), "gradient": steep, "top-gradient": first.expand_as(g),
         "ratio": steep / (other + 1e-5), "top-ratio": (first / (second + 1e-5)).expand_as(g)}[trust]
    wanted = g + gamma * r * h
    if rule == "averaged":
        wanted = wanted / (1 + gamma * r)
    model = SmoothedClassifier(accurate, robust, gamma, trust=trust, space=space, rule=rule)
    torch.testing.assert_close(model(x), wanted if space == "logits" else wanted.log())


@pytest.mark.parametrize(("trust", "space"), list(product(TRUSTS, SPACES)))
def test_the_ends_are_the_bases(trust: str, space: str) -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    for gamma, base in ((0.0, accurate), (math.inf, robust)):
        point = x.clone().requires_grad_()
        found = SmoothedClassifier(accurate, robust, gamma, trust=trust, space=space)(point)
        wanted = base(x) if space == "logits" else F.log_softmax(base(x), dim=1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert torch.isfinite(torch.autograd.grad(found.sum(), point)[0]).all()


def test_a_flat_accurate_side_is_kept_for_any_finite_strength() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(K, dtype=x.dtype).expand(len(x), K) + 0 * x.sum()

    model = SmoothedClassifier(Flat(), _base(2), 1e6, trust="gradient")
    torch.testing.assert_close(model(_images()), torch.arange(K, dtype=torch.float64).expand(B, K))
    x = _images().requires_grad_()
    assert torch.isfinite(torch.autograd.grad(model(x).sum(), x)[0]).all()


def test_constant_trust_over_probabilities_is_the_mixture() -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    found = SmoothedClassifier(accurate, robust, 3.0, space="probabilities")(x)
    torch.testing.assert_close(found, MixedClassifier(accurate, robust, 0.75)(x))


def test_each_image_can_have_its_own_strength() -> None:
    x, accurate, robust = _images(), _base(1), _base(2)
    model = SmoothedClassifier(accurate, robust, 1.0, trust="ratio")
    gammas = torch.tensor([0.0, 0.5, 8.0, math.inf])
    found = model.mixed(x, gate_of(gammas))
    for row, gamma in enumerate(gammas.tolist()):
        alone = SmoothedClassifier(accurate, robust, gamma, trust="ratio")(x[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], alone)


@pytest.mark.parametrize(("trust", "space"), list(product(TRUSTS, SPACES)))
def test_gradients_are_right_to_second_order(trust: str, space: str) -> None:
    chance = torch.Generator().manual_seed(4)
    smooth = [nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double() for _ in range(2)]
    for base in smooth:
        for weight in base.parameters():
            nn.init.normal_(weight, std=0.4, generator=chance)
    model = SmoothedClassifier(smooth[0], smooth[1], 0.6, trust=trust, space=space, norm="l2").requires_grad_(False)
    x = torch.rand(2, 3, 2, 2, dtype=torch.float64, generator=chance).requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))


SUITE = {"pgd": {"steps": 4}, "apgd": {"steps": 8}, "targeted": {"steps": 8, "targets": 2},
         "fab": {"steps": 5, "targets": 2}, "square": {"steps": 40}}


@pytest.mark.parametrize("attack", SUITE)
def test_every_attack_of_the_suite_runs_on_every_rule(attack: str) -> None:
    """Second derivatives included: the last layer bends, so that R has a slope of its own."""
    bases = [nn.Sequential(_base(seed).float(), nn.Tanh()) for seed in (1, 2)]
    threat, chance = Threat("linf", 0.2), rng.stream(0, attack, torch.arange(B))
    x = _images().float()
    for trust, space, rule in FAMILY:
        model = SmoothedClassifier(bases[0], bases[1], 1.0, trust=trust, space=space, rule=rule)
        with torch.no_grad():
            y = model(x).argmax(dim=1)
        found = named(attack, **SUITE[attack])(model, x, y, threat=threat, stream=chance)
        assert float((found - x).abs().max()) <= threat.eps
        before, after = (losses.signed_margin(model(at), y) for at in (x, found))
        assert bool((after <= before).all()) and bool((after < before).any()), (trust, space, rule)


def test_attacks_run_on_neighbours_two_classes_and_the_policy() -> None:
    x = _images().float()
    images = torch.rand(30, C, H, W, generator=torch.Generator().manual_seed(7))
    votes = Neighbours(images, torch.arange(30) % 2, 2, k=5, weights="distance")
    g, h = (_base(seed, classes=2).float() for seed in (1, 2))
    family = [SmoothedClassifier(g, votes, 0.1, trust="gradient"), SmoothedClassifier(g, votes, 0.1, trust="ratio"),
              BinarySmoothing(g, votes, 0.01), AdaptiveSmoothing(g, h, example=x, width=4, trust="ratio").eval()]
    for model in family:
        with torch.no_grad():
            y = model(x).argmax(dim=1)
        chance = rng.stream(0, "apgd", torch.arange(B))
        found = named("apgd", steps=8)(model, x, y, threat=Threat("l2", 2.0), stream=chance)
        before, after = (losses.signed_margin(model(at), y) for at in (x, found))
        assert bool((after < before).all())


class _Plane(nn.Module):
    """Two classes parted by wᵀx = 0.3, and logits ±(wᵀx − 0.3)/2."""

    def forward(self, x: Tensor) -> Tensor:
        w = torch.linspace(-1, 1, C * H * W, dtype=x.dtype)
        g = (x.flatten(1) @ w - 0.3) / 2
        return torch.stack((-g, g), dim=1)


class _Says(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return F.one_hot(torch.full((len(x),), self.number), 2).to(x.dtype)


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 2), (1.0, math.inf)])
def test_binary_smoothing_moves_a_linear_classifier_by_its_radius(norm: str | float, order: float) -> None:
    """γ ‖w‖_p* is exactly what a perturbation of size γ can take away, so no perturbation of size γ wins."""
    x, gamma = _images(), 0.05
    w = torch.linspace(-1, 1, C * H * W, dtype=torch.float64)
    g = x.flatten(1) @ w - 0.3
    for number, direction in ((0, -1.0), (1, 1.0)):
        z = BinarySmoothing(_Plane(), _Says(number), gamma, norm=norm)(x)
        wanted = biased(g, torch.tensor(direction), torch.linalg.vector_norm(w, order), gamma)
        torch.testing.assert_close(z[:, 1] - z[:, 0], wanted)


def test_mistakes_are_named() -> None:
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
def test_a_base_that_is_still_training_is_named(trust: str) -> None:
    learning = nn.Sequential(nn.Conv2d(C, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * H * W, K)).double()
    with pytest.raises(InputError, match=r"evaluation mode, model\.eval\(\)"):
        SmoothedClassifier(learning, _base(2), 1.0, trust=trust)(_images())
    assert SmoothedClassifier(learning.eval(), _base(2), 1.0, trust=trust)(_images()).shape == (B, K)
