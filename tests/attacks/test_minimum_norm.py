"""Minimum-norm search: exact radii of linear models, and what must hold for every model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attack_models import HardDecision, inner_images
from hypothesis import given, settings
from hypothesis import strategies as st
from test_apgd import CENTRE, Bowl

from conftest import Linear, generator
from equipoise.attacks import Fab, MinimumNorm, make_attack, radii_of
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.minimum_norm import BISECTIONS, MinimumNormSearch
from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.core.threat import NORMS, Threat

EPS = {"linf": 0.2, "l2": 2.0, "l1": 20.0}
SHORT = MinimumNorm(steps=10, targets=2, restarts=3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_linear_model_with_two_classes(norm: str, scale: float) -> None:
    """The exact radius is |w·x + b| over the dual norm of w, where [0, 1] is far away."""
    x = 0.5 + 0.01 * torch.randn(12, 3, 5, 7, generator=generator(3), dtype=torch.float64)
    w = torch.randn(105, generator=generator(4), dtype=torch.float64)
    value = (x.flatten(1) - 0.5) @ w
    model = Linear(
        torch.stack([w, -w]) * scale / 2, torch.stack([-0.5 * w.sum(), 0.5 * w.sum()]) * scale / 2
    )
    y = (value < 0).long()
    exact = value.abs() / geometry.dual_norm(w.expand(12, -1), norm)
    x_adv = SHORT(
        model, x, y, threat=Threat(norm, EPS[norm]), stream=stream(0, "radii", torch.arange(12))
    )
    assert bool((model(x_adv).argmax(dim=1) != y).all())
    size = geometry.size(x_adv - x, norm)
    assert bool((size >= exact * (1 - 1e-6)).all())
    torch.testing.assert_close(size, exact, rtol=0.003, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_run_of_apgd_lowers_a_bound(norm: str, dtype: torch.dtype) -> None:
    """From a bound of 1.3 times the exact radius, every kind of run finds a smaller perturbation,
    despite rounding."""
    x = (0.5 + 0.01 * torch.randn(12, 3, 5, 7, generator=generator(3))).to(dtype)
    w = torch.randn(105, generator=generator(4)).to(dtype)
    model = Linear(torch.stack([w, -w]), torch.stack([-0.5 * w.sum(), 0.5 * w.sum()]))
    value, numbers = (x.flatten(1) - 0.5) @ w, stream(0, "radii", torch.arange(12))
    exact, y = value.abs() / geometry.dual_norm(w.expand(12, -1), norm), (value < 0).long()
    search = MinimumNormSearch(
        MinimumNorm(20, 1, 3),
        GradientSource(model, GradientSettings(), "fp32", x),
        Threat(norm, EPS[norm]),
    )
    state = search.start(x, y, numbers)
    for run in range(3):
        bound = replace(state, size=1.3 * exact.double())
        points = search._run_apgd(bound, numbers, run)
        assert bool((model(points).argmax(dim=1) != y).all())
        kept = search._keep(bound, points)
        assert bool((kept.size < bound.size).all()) and bool((kept.size > 0.99 * exact).all())


def test_quadratic_model_in_euclidean_norm() -> None:
    """The boundary of a ball around c is nearest at x + t·(x − c)."""
    x, numbers = inner_images(6)
    distance = (x - CENTRE).flatten(1).norm(dim=1)
    edge = float(distance.max()) + 0.4  # so near that no pixel reaches 0 or 1
    bowl, exact, y = Bowl(CENTRE, edge), edge - distance, torch.zeros(6, dtype=torch.int64)
    x_adv = SHORT(bowl, x, y, threat=Threat("l2", 2), stream=numbers)
    size = geometry.size(x_adv - x, "l2")
    assert bool((size >= exact * (1 - 1e-6)).all())
    torch.testing.assert_close(size, exact, rtol=0.01, atol=0)


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(NORMS), st.integers(0, 9), st.booleans())
def test_every_radius_is_that_of_a_misclassified_image(norm: str, seed: int, single: bool) -> None:
    random = generator(seed)
    model = Linear(torch.randn(6, 105, generator=random), torch.randn(6, generator=random))
    x = torch.rand(6, 3, 5, 7, generator=random).round(decimals=1)  # some pixels at 0 and 1
    x, model = (x, model) if single else (x.double(), model.double())
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 6  # one image is misclassified clean
    threat = Threat(norm, {"linf": 0.03, "l2": 0.3, "l1": 2}[norm])
    x_adv = SHORT(model, x, y, threat=threat, stream=stream(seed, "radii", torch.arange(6)))
    broken = model(x_adv).argmax(dim=1) != y
    radii = radii_of(x_adv, x, broken.tolist(), norm)
    assert radii[0] == 0 and torch.equal(x_adv[0], x[0])
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    for radius, is_broken, delta in zip(radii, broken.tolist(), (x_adv - x).double(), strict=True):
        assert (radius is not None) == is_broken
        assert radius is None or float(geometry.size(delta.unsqueeze(0), norm)) <= radius * (
            1 + 1e-6
        ) <= threat.eps * (1 + 1e-6)
    fab = Fab(10, (1, 2))(model, x, y, threat=threat, stream=stream(seed, "radii", torch.arange(6)))
    smaller = geometry.size(x_adv - x, norm) <= geometry.size(fab - x, norm) * (1 + 1e-6)
    assert bool(smaller[model(fab).argmax(dim=1) != y].all()), (
        "never larger than what FAB alone finds"
    )


def test_models_without_gradients_need_a_surrogate(linear: Linear) -> None:
    x = torch.rand(4, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    y, numbers = linear(x).argmax(dim=1), stream(0, "radii", torch.arange(4))
    own = SHORT(linear, x, y, threat=Threat("linf", 0.1), stream=numbers)
    through = replace(SHORT, surrogate=linear)(
        HardDecision(linear), x, y, threat=Threat("linf", 0.1), stream=numbers
    )
    assert bool((linear(through).argmax(dim=1) != y).all())
    torch.testing.assert_close(
        geometry.size(through - x, "linf"), geometry.size(own - x, "linf"), rtol=0.05, atol=0
    )


def test_settings() -> None:
    assert make_attack("minimum-norm", steps=5, restarts=2, targets=3) == MinimumNorm(5, 3, 2)
    for setting in ("eot", "repeats"):
        with pytest.raises(InputError, match=f"`{setting}` must be left out for minimum-norm"):
            make_attack("minimum-norm", **{setting: 4})


def test_only_broken_points_are_pulled_back() -> None:
    """The others cost no further pass; they stay where they are, if they are nearer to breaking
    than before."""
    x = torch.full((3, 1, 2, 2), 0.4, dtype=torch.float64)
    w = torch.ones(4, dtype=torch.float64)
    model, y = (
        Linear(torch.stack([-w, w]), torch.tensor([2.0, -2.0], dtype=torch.float64)),
        torch.zeros(3).long(),
    )
    source = GradientSource(model, GradientSettings(), "fp32", x)
    search = MinimumNormSearch(MinimumNorm(1, 1, 1), source, Threat("l2", 1.0))
    passes: list[int] = []
    state = search.start(x, y, stream(0, "radii", torch.arange(3)))
    model.register_forward_hook(lambda module, given, logits: passes.append(len(given[0])))
    points = x + torch.tensor([0.3, 0.05, 0.2], dtype=torch.float64).view(3, 1, 1, 1)
    kept = search._keep(state, points)
    assert passes == [3] + [2] * BISECTIONS
    torch.testing.assert_close(
        kept.size[[0, 2]], torch.full((2,), 0.2, dtype=torch.float64), rtol=0.01, atol=0
    )
    assert kept.size[1].isinf() and torch.equal(kept.nearest[1], points[1])
    passes.clear()
    search._keep(state, x)
    assert passes == [3]
