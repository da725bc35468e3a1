"""Radii of the theorems with searched constants, against constants that are known."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.core import rng
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.radii import (
    Theorem1Constants,
    Theorem2Constants,
    theorem_1_bound,
    theorem_2_bound,
)
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.theorem_radii import estimate_radii

RADII = [1e-3 * 1.5**n for n in range(10)]
X = 0.3 + 0.4 * torch.rand(
    4, 1, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
STREAM = rng.stream(0, "theorem", torch.arange(4))


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double().eval().requires_grad_(False)


def norms(model: nn.Module) -> torch.Tensor:
    """‖∇f_k‖ in the dual of ℓ∞, the same for every image."""
    return model[1].weight.abs().sum(dim=1).expand(4, -1)  # type: ignore[index, no-any-return]


def expected(bounds: dict[float, torch.Tensor]) -> torch.Tensor:
    best = torch.zeros(4, dtype=torch.float64)
    for radius, bound in bounds.items():
        best = torch.where(bound >= radius, radius, best)
    return best


def test_theorem_2_of_linear_models_is_exact() -> None:
    """The gradients are constant, and |f_k| is largest at |f_k(x)| + r‖w_k‖, which one step of
    ascent reaches."""
    g, h = linear(0), linear(1)
    rule = SmoothedClassifier(g, h, 0.5, trust="ratio")

    def constants(model: nn.Module, radius: float) -> Theorem2Constants:
        size = norms(model)
        return Theorem2Constants(
            model(X).abs() + radius * size, size, size, torch.zeros_like(size), exact=True
        )

    radii, predicted = estimate_radii(rule, X, RADII, STREAM)
    ratio = norms(g) / (norms(h) + rule.floor)
    bounds = {
        radius: theorem_2_bound(
            rule(X), ratio, 0.5, constants(g, radius), constants(h, radius), rule.floor
        )
        for radius in RADII
    }
    torch.testing.assert_close(radii.double(), expected(bounds))
    assert bool((radii > 0).any()) and torch.equal(predicted, rule(X).argmax(dim=1))


def test_theorem_1_holds_only_where_votes_are_constant() -> None:
    g = linear(0)
    votes = Neighbours(X, torch.tensor([0, 1, 2, 3]), 4, k=1)
    rule = SmoothedClassifier(g, votes, 0.5, trust="gradient")
    constants = Theorem1Constants(norms(g), torch.zeros(4, 4, dtype=torch.float64), exact=True)
    value, limit = (
        theorem_1_bound(rule(X), g(X), norms(g), 0.5, constants),
        votes.constant_vote_radius(X),
    )
    radii, _ = estimate_radii(rule, X, RADII, STREAM)
    torch.testing.assert_close(
        radii.double(),
        expected({radius: torch.where(limit >= radius, value, 0.0) for radius in RADII}),
    )
    assert bool((radii <= limit).all()) and bool((radii > 0).any())
