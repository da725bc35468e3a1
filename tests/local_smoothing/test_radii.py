"""Theorems 1 and 2 with known constants: linear and quadratic models, attacked inside the
radius."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import geometry, rng
from equipoise.core.checks import InputError
from equipoise.core.geometry import dual_order
from equipoise.core.threat import Threat
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.radii import (
    Radius,
    Theorem1Constants,
    Theorem2Constants,
    estimate_theorem_1_constants,
    estimate_theorem_2_constants,
    largest_radius,
    theorem_1_bound,
    theorem_2_bound,
)
from equipoise.local_smoothing.smoothing import SmoothedClassifier

B, C, H, W, K = 5, 1, 2, 3, 4
D = C * H * W
RADII = [0.002 * 1.3**n for n in range(22)]


class _Linear(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(K, D, generator=generator, dtype=torch.float64)
        self.bias = torch.randn(K, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + self.bias

    def constants(self, x: Tensor, threat: Threat) -> Theorem2Constants:
        norms = torch.linalg.vector_norm(self.weight, dual_order(threat.norm), dim=1).expand(
            len(x), K
        )
        return Theorem2Constants(
            self(x).abs() + threat.eps * norms, norms, norms, torch.zeros_like(norms), exact=True
        )


class _Quadratic(nn.Module):
    """f_k = s_k ‖x − c_k‖² / 2 + b_k: in ℓ2 every constant is known."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.centres = 3 * torch.rand(K, D, generator=generator, dtype=torch.float64) - 1
        self.scales = torch.randn(K, generator=generator, dtype=torch.float64)
        self.bias = torch.randn(K, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.scales * self.distance(x).square() / 2 + self.bias

    def distance(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x.flatten(1).unsqueeze(1) - self.centres, dim=2)  # type: ignore[no-any-return]

    def constants(self, x: Tensor, threat: Threat) -> Theorem2Constants:
        distance, eps, s = self.distance(x), threat.eps, self.scales.abs()
        far, near = distance + eps, (distance - eps).clamp_min(0)
        ends = torch.stack([self.scales * end.square() / 2 + self.bias for end in (far, near)])
        return Theorem2Constants(
            ends.abs().amax(dim=0), s * near, s * far, s.expand_as(distance), exact=True
        )


class _Constant(nn.Module):
    """An oracle whose votes are constant."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.4, -0.8, 0.2, -1.0], dtype=x.dtype).expand(len(x), K)


def _images() -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _survives(model: nn.Module, x: Tensor, radius: Tensor, norm: str) -> bool:
    """Whether no sample and no gradient step inside the radius (not clipped to [0, 1]) changes the
    class."""
    classes = model(x).argmax(dim=1)
    random_stream = rng.stream(0, "survive", torch.arange(len(x)))
    for draw in range(40):
        direction = geometry.steepest(random_stream.at(draw).normal(C, H, W).double(), norm)
        for _ in range(5):
            at = (x + geometry.per_example(radius, x) * direction).requires_grad_()
            z = model(at)
            if not torch.equal(z.argmax(dim=1), classes):
                return False
            others = z.scatter(1, classes.unsqueeze(1), -math.inf).amax(dim=1)
            loss = (others - z.gather(1, classes.unsqueeze(1)).squeeze(1)).sum()
            direction = geometry.steepest(torch.autograd.grad(loss, at)[0], norm)
    return True


def _theorem_1(
    g: _Linear | _Quadratic, x: Tensor, norm: str, gamma: float, oracle: nn.Module | None = None
) -> tuple[nn.Module, Radius]:
    model = SmoothedClassifier(g, oracle or _Constant(), gamma, trust="gradient", norm=norm)
    values, _, sizes, _ = model.sides_and_trust(x)

    def bound(eps: float) -> tuple[Tensor, bool]:
        constants = g.constants(x, Threat(norm, eps))
        # ‖∇g(x') − ∇g(x + δ)‖ ≤ L ε, and the denominator is at least 1 + γ m.
        over = Theorem1Constants(
            constants.max_gradient,
            constants.curvature / (1 + gamma * constants.min_gradient),
            exact=True,
        )
        return theorem_1_bound(model(x), values, sizes, gamma, over), over.exact

    return model, largest_radius(bound, RADII)


def _theorem_2(
    g: _Linear | _Quadratic, h: _Linear | _Quadratic, x: Tensor, norm: str, gamma: float
) -> tuple[nn.Module, Radius]:
    model = SmoothedClassifier(g, h, gamma, trust="ratio", norm=norm, floor=1e-5)
    ratio = model.sides_and_trust(x)[2]

    def bound(eps: float) -> tuple[Tensor, bool]:
        threat = Threat(norm, eps)
        return theorem_2_bound(
            model(x), ratio, gamma, g.constants(x, threat), h.constants(x, threat), floor=1e-5
        ), True

    return model, largest_radius(bound, RADII)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_theorem_1_on_linear_models(norm: str, gamma: float) -> None:
    x = _images()
    model, radius = _theorem_1(_Linear(1), x, norm, gamma)
    assert radius.exact and bool((radius.value > 0).any())
    assert _survives(model, x, radius.value, norm)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
def test_theorem_1_on_quadratic_models(gamma: float) -> None:
    x = _images()
    model, radius = _theorem_1(_Quadratic(2), x, "l2", gamma)
    assert bool((radius.value > 0).any()) and _survives(model, x, radius.value, "l2")


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_theorem_1_with_neighbours_while_their_votes_are_constant(norm: str) -> None:
    x, generator = _images(), torch.Generator().manual_seed(6)
    votes = Neighbours(
        torch.rand(12, C, H, W, generator=generator, dtype=torch.float64),
        torch.arange(12) % K,
        K,
        k=3,
    )
    model, radius = _theorem_1(_Linear(1), x, norm, 0.3, votes)
    within = torch.minimum(radius.value, votes.constant_vote_radius(x, norm))
    assert bool((within > 0).any()) and _survives(model, x, within, norm)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
@pytest.mark.parametrize(
    ("g", "h", "norm"),
    [
        (_Linear(1), _Linear(2), "linf"),
        (_Linear(1), _Linear(2), "l2"),
        (_Quadratic(4), _Linear(2), "l2"),
        (_Linear(1), _Quadratic(4), "l2"),
    ],
)
def test_theorem_2(
    g: _Linear | _Quadratic, h: _Linear | _Quadratic, norm: str, gamma: float
) -> None:
    x = _images()
    model, radius = _theorem_2(g, h, x, norm, gamma)
    assert bool((radius.value > 0).any()) and _survives(model, x, radius.value, norm)


def test_the_attack_succeeds_outside_the_radius() -> None:
    x = _images()
    model, radius = _theorem_1(_Linear(1), x, "l2", 0.3)
    assert not _survives(model, x, radius.value + 2, "l2")


def test_theorem_1_without_curvature_is_gap_over_b() -> None:
    """Linear g: L = 0, b = Σ M/(1 + γM)."""
    g, x, gamma = _Linear(1), _images(), 0.7
    model = SmoothedClassifier(g, _Constant(), gamma, trust="gradient", norm="l2")
    values, _, sizes, _ = model.sides_and_trust(x)
    scores = model(x)
    constants = Theorem1Constants(sizes, torch.zeros_like(sizes), exact=True)
    result = theorem_1_bound(scores, values, sizes, gamma, constants)
    slope = sizes / (1 + gamma * sizes)
    for row in range(B):
        i = int(scores[row].argmax())
        wanted = min(
            float(scores[row, i] - scores[row, j]) / float(slope[row, i] + slope[row, j])
            for j in range(K)
            if j != i
        )
        assert float(result[row]) == pytest.approx(wanted)


def _some(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(0.1 + torch.rand(B, K, generator=generator, dtype=torch.float64) for _ in range(5))


def test_theorem_1_is_its_formula() -> None:
    (scores, g, size, most, bend), gamma = _some(8), 0.7
    result = theorem_1_bound(scores, g, size, gamma, Theorem1Constants(most, bend, exact=True))
    for row in range(B):
        i, radii = int(scores[row].argmax()), []
        for j in set(range(K)) - {i}:
            b = sum(
                float(
                    gamma * bend[row, k] * abs(g[row, k]) / (1 + gamma * size[row, k])
                    + 2 * gamma * bend[row, k]
                    + most[row, k] / (1 + most[row, k] * gamma)
                )
                for k in (i, j)
            )
            both, gap = (
                float(bend[row, i] + bend[row, j]),
                abs(float(scores[row, i] - scores[row, j])),
            )
            radii.append((math.sqrt(b * b + 4 * both * gap) - b) / (2 * both))
        assert float(result[row]) == pytest.approx(min(radii))


def test_theorem_2_is_its_formula() -> None:
    (scores, ratio, kg, mg, more_g), (kh, mh, more_h, lg, lh), gamma = _some(8), _some(9), 0.7
    big_g, big_h = mg + more_g, mh + more_h  # a supremum is no less than its infimum
    result = theorem_2_bound(
        scores,
        ratio,
        gamma,
        Theorem2Constants(kg, mg, big_g, lg, exact=True),
        Theorem2Constants(kh, mh, big_h, lh, exact=True),
    )
    below = (1 + gamma * mg / big_h) * (1 + gamma * ratio)
    first = (big_g * (1 + gamma * big_g / mh) + gamma * kg / mh * (lh * ratio + lg)) / below
    second = (big_g * big_h / mh * (1 + gamma * ratio) + kh / mh * (lh * ratio + lg)) / below
    for row in range(B):
        i = int(scores[row].argmax())
        radii = [
            abs(float(scores[row, i] - scores[row, j]))
            / sum(float(first[row, k] + gamma * second[row, k]) for k in (i, j))
            for j in set(range(K)) - {i}
        ]
        assert float(result[row]) == pytest.approx(min(radii))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_estimated_constants_of_a_linear_model(norm: str) -> None:
    g, x, threat = _Linear(1), _images() * 0.5 + 0.25, Threat(norm, 0.05)
    random_stream = rng.stream(0, "constants", torch.arange(B))
    result, known = (
        estimate_theorem_2_constants(g, x, threat=threat, stream=random_stream),
        g.constants(x, threat),
    )
    assert not result.exact
    for name in ("max_value", "min_gradient", "max_gradient", "curvature"):
        # On the sphere the ascent converges gradually; in the cube it reaches the corner.
        torch.testing.assert_close(
            getattr(result, name),
            getattr(known, name),
            rtol=1e-6 if norm == "linf" else 5e-3,
            atol=1e-9,
        )


def test_estimated_constants_of_a_quadratic_model_are_lower_bounds() -> None:
    g, x, threat = _Quadratic(2), _images() * 0.5 + 0.25, Threat("l2", 0.1)
    random_stream = rng.stream(0, "constants", torch.arange(B))
    result = estimate_theorem_2_constants(g, x, threat=threat, stream=random_stream, steps=20)
    known = g.constants(x, threat)
    for name in ("max_value", "max_gradient"):
        assert bool((getattr(result, name) <= getattr(known, name) + 1e-9).all())
        torch.testing.assert_close(
            getattr(result, name), getattr(known, name), rtol=0.01, atol=1e-3
        )
    torch.testing.assert_close(result.min_gradient, known.min_gradient, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(result.curvature, known.curvature)
    first = estimate_theorem_1_constants(
        g, x, threat=threat, gamma=0.3, stream=random_stream, steps=20
    )
    torch.testing.assert_close(first.max_gradient, result.max_gradient)
    assert bool((first.curvature <= known.curvature / (1 + 0.3 * known.min_gradient) + 1e-9).all())
    assert bool((first.curvature > 0.9 * known.curvature / (1 + 0.3 * known.max_gradient)).all())


def test_a_radius_is_exact_only_if_all_constants_are() -> None:
    result = largest_radius(lambda eps: (torch.tensor([0.25, 0.05]), eps < 0.15), [0.1, 0.2, 0.3])
    assert result.value.tolist() == pytest.approx([0.2, 0.0]) and not result.exact
    none = torch.zeros(1, 2)
    side = Theorem2Constants(none, none, none, none, exact=True)
    with pytest.raises(InputError, match="gamma"):
        theorem_2_bound(none, none, math.inf, side, side)
