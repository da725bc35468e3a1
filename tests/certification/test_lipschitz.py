from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from closed_form import Bins
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.certification import estimate_local, lipschitz, lipschitz_radius, radii
from equipoise.core import geometry, rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat


def gaussian_constant(sigma: float) -> float:
    """ℓ2 Lipschitz constant of a probability smoothed with N(0, sigma²)."""
    return 1 / (sigma * math.sqrt(2 * math.pi))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.55, 1.0), st.sampled_from(["l2", "linf"]))
def test_radius_on_linear_probabilities(seed: int, alpha: float, norm: str) -> None:
    """h_0 = ½ + w·x, h_1 = ½ − w·x: constants are dual norms of w, and the first failure is known
    exactly."""
    w = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.02
    dual = w.norm() if norm == "l2" else w.abs().sum()
    x = torch.randn(12, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    half = float((w @ x).clamp(-0.49, 0.49))
    h = torch.tensor([[0.5 + half, 0.5 - half]], dtype=torch.float64)
    radius = lipschitz_radius(h, torch.stack((dual, dual)), alpha).item()
    # |h_0 − h_1| falls by 2·dual·r, and an adversarial g takes the class at (1 − alpha)/alpha.
    true = max(2 * abs(half) - (1 - alpha) / alpha, 0) / (2 * dual.item())
    assert radius <= true + 1e-9 and radius == pytest.approx(true, abs=1e-9)


def test_the_constant_of_gaussian_smoothing_is_sharp() -> None:
    """The steepest smoothed probability is that of a half-space: slope φ(0)/σ."""
    for sigma in (0.25, 1.0):
        x = torch.tensor([0.5 + 1e-5, 0.5 - 1e-5], dtype=torch.float64).view(2, 1, 1, 1)
        p = Bins((0.0, 1.0)).smoothed(x, sigma)
        assert gaussian_constant(sigma) == pytest.approx((p[0, 1] - p[1, 1]) / 2e-5, rel=1e-4)


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.floats(0.05, 2), st.floats(0.5, 1.0))
def test_theorem_3_5_uses_twice_the_sharp_constant(p: float, sigma: float, alpha: float) -> None:
    """With h_i ≤ 1 − p; never above ours."""
    h = (
        torch.tensor([[p, 1 - p]], dtype=torch.float64)
        if p >= 0.5
        else torch.tensor([[0.5, 0.5]]).double()
    )
    constants = torch.full((2,), 2 * gaussian_constant(sigma), dtype=torch.float64)
    radius = float(radii.theorem_3_5(p, sigma, alpha))
    assert radius == pytest.approx(float(lipschitz_radius(h, constants, alpha)), abs=1e-7)
    assert radius <= radii.one_sided(p, sigma, alpha) + 1e-9


@settings(deadline=None, max_examples=100)
@given(st.floats(-5, 5), st.floats(0.5, 1.0), st.floats(0.1, 1.0))
def test_radii_on_half_spaces(sigmas: float, alpha: float, sigma: float) -> None:
    """With exact probabilities no radius exceeds the true distance at which some g takes over."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    p = float(normal.cdf(torch.tensor(abs(sigmas), dtype=torch.float64)))
    needed = (
        float(normal.icdf(torch.tensor(1 / (2 * alpha), dtype=torch.float64)))
        if alpha > 0.5
        else math.inf
    )
    true = max(sigma * (abs(sigmas) - needed), 0.0)
    ours, theirs = (
        float(radii.one_sided(p, sigma, alpha)),
        float(radii.theorem_a2(p, 1 - p, sigma, alpha)),
    )
    assert ours <= true + 1e-12 and theirs <= true + 1e-12
    assert ours == pytest.approx(true, abs=1e-6)
    h = torch.tensor([[p, 1 - p]], dtype=torch.float64)
    assert (
        lipschitz_radius(h, torch.full((2,), gaussian_constant(sigma)), alpha).item() <= true + 1e-9
    )


def test_radius_is_never_rounded_up() -> None:
    """Against exact fractions of the same numbers, also in single precision."""
    drawn = torch.randn(400, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    h, constants = torch.softmax(4.0 * drawn, dim=1).float(), torch.tensor([0.3, 0.7, 1.1])
    for row, radius in zip(h.tolist(), lipschitz_radius(h, constants, 0.8).tolist(), strict=True):
        y = row.index(max(row))
        weight, exact = Fraction(0.8), [Fraction(value) for value in constants.tolist()]
        true = min(
            (Fraction(row[y]) - Fraction(row[i]) - (1 - weight) / weight) / (exact[y] + exact[i])
            for i in range(3)
            if i != y
        )
        assert radius == 0 or Fraction(radius) < true
        assert radius >= float(true) - 1e-11


def test_bad_constants() -> None:
    with pytest.raises(InputError, match=r"`probabilities` must lie in \[0, 1\]"):
        lipschitz_radius(torch.tensor([[3.0, -1.0]]), torch.tensor([1.0, 1.0]), 0.8)
    with pytest.raises(InputError, match="`constants` must not be negative"):
        lipschitz_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([1.0, -1.0]), 0.8)
    with pytest.raises(InputError, match="`alpha` must lie"):
        lipschitz_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([1.0, 1.0]), 0.4)


def test_local_estimate_on_a_linear_model(linear: torch.nn.Module) -> None:
    x = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    threat = Threat("l2", 0.05)
    estimate = estimate_local(
        linear, x, threat=threat, stream=rng.stream(0, "local", torch.arange(4))
    )
    assert (
        estimate.constants.shape == (4, 6)
        and (estimate.constants >= 0).all()
        and estimate.averaged.shape == (4,)
    )
    # No change is larger than the steepest slope of a softmax allows: max ‖w_i − w_j‖ / 4 · 2.
    weight = next(linear.parameters())
    spread = torch.cdist(weight, weight).max()
    assert (
        estimate.constants <= spread / 2 + 1e-9
    ).all() and estimate.constants.max() > 0.05 * spread
    # Where a random search already changes the class, the estimate must not claim a margin.
    kept = estimate.margins >= radii.lemma_margin(0.9)
    for seed in range(20):
        moved = geometry.draw(x, threat, rng.stream(seed, "search", torch.arange(4)))
        changed = estimate.probabilities.argmax(dim=1) != torch.softmax(
            linear(moved), dim=1
        ).argmax(dim=1)
        assert not (changed & kept).any()


def test_classes_that_share_their_passes_have_the_same_estimates(
    linear: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; every iterate counts, the first and the last too."""
    x = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stream, calls = rng.stream(0, "local", torch.arange(3)), []
    linear.register_forward_hook(lambda module, given, logits: calls.append(len(given[0])))
    alone = estimate_local(linear, x, threat=Threat("l2", 0.3), stream=stream, steps=4, restarts=2)
    assert calls == [3] * (1 + 6 * 2 * 5)
    monkeypatch.setattr(lipschitz, "CLASSES_PER_PASS", {"cpu": 4})
    calls.clear()
    together = estimate_local(
        linear, x, threat=Threat("l2", 0.3), stream=stream, steps=4, restarts=2
    )
    assert calls == [3] + [12] * 10 + [6] * 10
    assert torch.allclose(alone.constants, together.constants, rtol=1e-12, atol=0)
