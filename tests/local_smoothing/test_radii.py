"""Theorems 1 and 2 where their constants are known: linear and quadratic models, attacked inside the radius."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import geometry, rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.local_smoothing import constants
from equipoise.local_smoothing.jacobian import dual
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.radii import Radius, Shape, Steepness, largest, neighbours_bound, robust_bound
from equipoise.local_smoothing.smoothing import SmoothedClassifier

B, C, H, W, K = 5, 1, 2, 3, 4
D = C * H * W
RADII = [0.002 * 1.3**n for n in range(22)]


class _Linear(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(K, D, generator=chance, dtype=torch.float64)
        self.bias = torch.randn(K, generator=chance, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + self.bias

    def shape(self, x: Tensor, threat: Threat) -> Shape:
        steep = torch.linalg.vector_norm(self.weight, dual(threat.norm), dim=1).expand(len(x), K)
        return Shape(self(x).abs() + threat.eps * steep, steep, steep, torch.zeros_like(steep), exact=True)


class _Quadratic(nn.Module):
    """f_k = s_k ‖x − c_k‖² / 2 + b_k: in ℓ2 every constant is known."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.centres = 3 * torch.rand(K, D, generator=chance, dtype=torch.float64) - 1
        self.scales = torch.randn(K, generator=chance, dtype=torch.float64)
        self.bias = torch.randn(K, generator=chance, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.scales * self.way(x).square() / 2 + self.bias

    def way(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x.flatten(1).unsqueeze(1) - self.centres, dim=2)  # type: ignore[no-any-return]

    def shape(self, x: Tensor, threat: Threat) -> Shape:
        way, eps, s = self.way(x), threat.eps, self.scales.abs()
        far, near = way + eps, (way - eps).clamp_min(0)
        ends = torch.stack([self.scales * end.square() / 2 + self.bias for end in (far, near)])
        return Shape(ends.abs().amax(dim=0), s * near, s * far, s.expand_as(way), exact=True)


class _Constant(nn.Module):
    """An oracle whose votes never move."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.4, -0.8, 0.2, -1.0], dtype=x.dtype).expand(len(x), K)


def _images() -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _survives(model: nn.Module, x: Tensor, radius: Tensor, norm: str) -> bool:
    """Nobody changes the answer inside the radius (which is not cut to [0, 1]): samples and steps up the margin."""
    answer = model(x).argmax(dim=1)
    chance = rng.stream(0, "survive", torch.arange(len(x)))
    for draw in range(40):
        way = geometry.steepest(chance.at(draw).normal(C, H, W).double(), norm)
        for _ in range(5):
            at = (x + geometry.per_example(radius, x) * way).requires_grad_()
            z = model(at)
            if not torch.equal(z.argmax(dim=1), answer):
                return False
            others = z.scatter(1, answer.unsqueeze(1), -math.inf).amax(dim=1)
            loss = (others - z.gather(1, answer.unsqueeze(1)).squeeze(1)).sum()
            way = geometry.steepest(torch.autograd.grad(loss, at)[0], norm)
    return True


def _theorem_1(g: _Linear | _Quadratic, x: Tensor, norm: str, gamma: float,
               oracle: nn.Module | None = None) -> tuple[nn.Module, Radius]:
    model = SmoothedClassifier(g, oracle or _Constant(), gamma, trust="gradient", norm=norm)
    values, _, sizes, _ = model.parts(x)

    def bound(eps: float) -> tuple[Tensor, bool]:
        shape = g.shape(x, Threat(norm, eps))
        # ‖∇g(x') − ∇g(x + δ)‖ ≤ L ε, and the denominator is at least 1 + γ m.
        over = Steepness(shape.most, shape.bend / (1 + gamma * shape.least), exact=True)
        return neighbours_bound(model(x), values, sizes, gamma, over), over.exact

    return model, largest(bound, RADII)


def _theorem_2(g: _Linear | _Quadratic, h: _Linear | _Quadratic, x: Tensor, norm: str, gamma: float) -> tuple[
        nn.Module, Radius]:
    model = SmoothedClassifier(g, h, gamma, trust="ratio", norm=norm, floor=1e-5)
    ratio = model.parts(x)[2]

    def bound(eps: float) -> tuple[Tensor, bool]:
        threat = Threat(norm, eps)
        return robust_bound(model(x), ratio, gamma, g.shape(x, threat), h.shape(x, threat), floor=1e-5), True

    return model, largest(bound, RADII)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_theorem_1_on_linear_models(norm: str, gamma: float) -> None:
    x = _images()
    model, radius = _theorem_1(_Linear(1), x, norm, gamma)
    assert radius.kind == "certificate" and bool((radius.value > 0).any())
    assert _survives(model, x, radius.value, norm)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
def test_theorem_1_on_quadratic_models(gamma: float) -> None:
    x = _images()
    model, radius = _theorem_1(_Quadratic(2), x, "l2", gamma)
    assert bool((radius.value > 0).any()) and _survives(model, x, radius.value, "l2")


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_theorem_1_with_neighbours_while_their_votes_are_constant(norm: str) -> None:
    x, chance = _images(), torch.Generator().manual_seed(6)
    votes = Neighbours(torch.rand(12, C, H, W, generator=chance, dtype=torch.float64), torch.arange(12) % K, K, k=3)
    model, radius = _theorem_1(_Linear(1), x, norm, 0.3, votes)
    within = torch.minimum(radius.value, votes.steady(x, norm))
    assert bool((within > 0).any()) and _survives(model, x, within, norm)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
@pytest.mark.parametrize(("g", "h", "norm"), [(_Linear(1), _Linear(2), "linf"), (_Linear(1), _Linear(2), "l2"),
                                              (_Quadratic(4), _Linear(2), "l2"), (_Linear(1), _Quadratic(4), "l2")])
def test_theorem_2(g: _Linear | _Quadratic, h: _Linear | _Quadratic, norm: str, gamma: float) -> None:
    x = _images()
    model, radius = _theorem_2(g, h, x, norm, gamma)
    assert bool((radius.value > 0).any()) and _survives(model, x, radius.value, norm)


def test_the_check_can_fail() -> None:
    x = _images()
    model, radius = _theorem_1(_Linear(1), x, "l2", 0.3)
    assert not _survives(model, x, radius.value + 2, "l2")


def test_theorem_1_without_curvature_is_gap_over_b() -> None:
    """Linear g: L = 0, b = Σ M/(1 + γM)."""
    g, x, gamma = _Linear(1), _images(), 0.7
    model = SmoothedClassifier(g, _Constant(), gamma, trust="gradient", norm="l2")
    values, _, sizes, _ = model.parts(x)
    scores = model(x)
    found = neighbours_bound(scores, values, sizes, gamma, Steepness(sizes, torch.zeros_like(sizes), exact=True))
    slope = sizes / (1 + gamma * sizes)
    for row in range(B):
        i = int(scores[row].argmax())
        wanted = min(float(scores[row, i] - scores[row, j]) / float(slope[row, i] + slope[row, j])
                     for j in range(K) if j != i)
        assert float(found[row]) == pytest.approx(wanted)


def _some(seed: int) -> tuple[Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    return tuple(0.1 + torch.rand(B, K, generator=chance, dtype=torch.float64) for _ in range(5))


def test_theorem_1_is_its_formula() -> None:
    (scores, g, size, most, bend), gamma = _some(8), 0.7
    found = neighbours_bound(scores, g, size, gamma, Steepness(most, bend, exact=True))
    for row in range(B):
        i, radii = int(scores[row].argmax()), []
        for j in set(range(K)) - {i}:
            b = sum(float(gamma * bend[row, k] * abs(g[row, k]) / (1 + gamma * size[row, k]) + 2 * gamma * bend[row, k]
                          + most[row, k] / (1 + most[row, k] * gamma)) for k in (i, j))
            both, gap = float(bend[row, i] + bend[row, j]), abs(float(scores[row, i] - scores[row, j]))
            radii.append((math.sqrt(b * b + 4 * both * gap) - b) / (2 * both))
        assert float(found[row]) == pytest.approx(min(radii))


def test_theorem_2_is_its_formula() -> None:
    (scores, ratio, kg, mg, more_g), (kh, mh, more_h, lg, lh), gamma = _some(8), _some(9), 0.7
    big_g, big_h = mg + more_g, mh + more_h  # a supremum is no less than its infimum
    found = robust_bound(scores, ratio, gamma, Shape(kg, mg, big_g, lg, exact=True),
                         Shape(kh, mh, big_h, lh, exact=True))
    below = (1 + gamma * mg / big_h) * (1 + gamma * ratio)
    first = (big_g * (1 + gamma * big_g / mh) + gamma * kg / mh * (lh * ratio + lg)) / below
    second = (big_g * big_h / mh * (1 + gamma * ratio) + kh / mh * (lh * ratio + lg)) / below
    for row in range(B):
        i = int(scores[row].argmax())
        radii = [abs(float(scores[row, i] - scores[row, j]))
                 / sum(float(first[row, k] + gamma * second[row, k]) for k in (i, j)) for j in set(range(K)) - {i}]
        assert float(found[row]) == pytest.approx(min(radii))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_searched_constants_of_a_linear_model_are_its_own(norm: str) -> None:
    g, x, threat = _Linear(1), _images() * 0.5 + 0.25, Threat(norm, 0.05)
    chance = rng.stream(0, "constants", torch.arange(B))
    found, known = constants.shape(g, x, threat=threat, stream=chance), g.shape(x, threat)
    assert not found.exact
    for name in ("high", "least", "most", "bend"):
        # On the sphere the ascent comes near in steps; in the cube it reaches the corner.
        torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=1e-6 if norm == "linf" else 5e-3,
                                   atol=1e-9)


def test_searched_constants_of_a_quadratic_model_come_near_from_inside() -> None:
    g, x, threat = _Quadratic(2), _images() * 0.5 + 0.25, Threat("l2", 0.1)
    chance = rng.stream(0, "constants", torch.arange(B))
    found, known = constants.shape(g, x, threat=threat, stream=chance, steps=20), g.shape(x, threat)
    for name in ("high", "most"):
        assert bool((getattr(found, name) <= getattr(known, name) + 1e-9).all())
        torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=0.01, atol=1e-3)
    torch.testing.assert_close(found.least, known.least, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(found.bend, known.bend)
    steep = constants.steepness(g, x, threat=threat, gamma=0.3, stream=chance, steps=20)
    torch.testing.assert_close(steep.most, found.most)
    assert bool((steep.bend <= known.bend / (1 + 0.3 * known.least) + 1e-9).all())
    assert bool((steep.bend > 0.9 * known.bend / (1 + 0.3 * known.most)).all())


def test_radii_say_what_they_are() -> None:
    assert Radius(torch.zeros(1), exact=False).kind == "estimate"
    found = largest(lambda eps: (torch.tensor([0.25, 0.05]), eps < 0.15), [0.1, 0.2, 0.3])
    assert found.value.tolist() == pytest.approx([0.2, 0.0]) and not found.exact
    none = torch.zeros(1, 2)
    side = Shape(none, none, none, none, exact=True)
    with pytest.raises(InputError, match="gamma"):
        robust_bound(none, none, math.inf, side, side)
