from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from closed_form import Bins, chance, images
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.certification import ABSTAIN, Engine, SmoothingPlan, certify, lipschitz, lipschitz_radius, mixture, radii
from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.mixing import gate_of, mix

alphas = st.floats(0.5, 1.0)


def softmax(seed: int, count: int, classes: int, scale: float) -> torch.Tensor:
    drawn = torch.randn(count, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(scale * drawn, dim=1)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), alphas, st.floats(0.1, 20))
def test_lemma_holds_for_any_accurate_classifier(seed: int, alpha: float, scale: float) -> None:
    h = softmax(seed, 50, 6, scale)
    kept = mixture.keeps_class(h, alpha)
    for one_hot in torch.eye(6, dtype=torch.float64):
        g = one_hot.clamp(1e-300).expand_as(h)
        mixed = mix(g.log(), h.log(), gate_of(alpha).double())
        # At equality the two classes tie; the lemma speaks of the larger or equal one.
        own = mixed.gather(1, h.argmax(dim=1, keepdim=True)).squeeze(1)
        assert (own >= mixed.amax(dim=1) - 1e-7)[kept].all()


def test_lemma_is_tight() -> None:
    """The paper's example: with less margin, the accurate classifier that is sure of the runner-up wins."""
    alpha = 0.7
    need = (1 - alpha) / alpha
    for slip, wins in ((1e-6, False), (-1e-6, True)):
        top = (1 + need - slip) / 2
        h = torch.tensor([[top, 1 - top]], dtype=torch.float64)
        g = torch.tensor([[1e-300, 1.0]], dtype=torch.float64)
        mixed = mix(g.log(), h.log(), gate_of(alpha).double())
        assert (mixed.argmax(dim=1) == 0).item() is wins
        assert mixture.keeps_class(h, alpha).item() is wins


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.55, 1.0), st.sampled_from(["l2", "linf"]))
def test_lipschitz_radius_on_linear_probabilities(seed: int, alpha: float, norm: str) -> None:
    """h_0 = ½ + w·x, h_1 = ½ − w·x: constants are dual norms of w, and the first failure is known exactly."""
    w = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.02
    dual = w.norm() if norm == "l2" else w.abs().sum()
    x = torch.randn(12, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    half = float((w @ x).clamp(-0.49, 0.49))
    h = torch.tensor([[0.5 + half, 0.5 - half]], dtype=torch.float64)
    radius = lipschitz_radius(h, torch.stack((dual, dual)), alpha).item()
    # |h_0 − h_1| falls by 2·dual·r, and an adversarial g takes the class at (1 − alpha)/alpha.
    true = max(2 * abs(half) - (1 - alpha) / alpha, 0) / (2 * dual.item())
    assert radius <= true + 1e-9 and radius == pytest.approx(true, abs=1e-9)


def test_gaussian_constant_is_sharp() -> None:
    """The steepest smoothed probability is that of a half-space: slope φ(0)/σ."""
    for sigma in (0.25, 1.0):
        either = torch.tensor([0.5 + 1e-5, 0.5 - 1e-5], dtype=torch.float64).view(2, 1, 1, 1)
        p = Bins((0.0, 1.0)).smoothed(either, sigma)
        measured = (p[0, 1] - p[1, 1]) / 2e-5
        assert lipschitz.gaussian_constant(sigma) == pytest.approx(measured, rel=1e-4)
        assert lipschitz.gaussian_constant(sigma, paper=True) == pytest.approx(math.sqrt(2 / math.pi) / sigma)


@settings(deadline=None, max_examples=100)
@given(st.floats(-5, 5), st.floats(0.5, 1.0), st.floats(0.1, 1.0))
def test_smoothed_radii_on_half_spaces(sigmas: float, alpha: float, sigma: float) -> None:
    """With exact probabilities no radius exceeds the true distance at which some g takes over."""
    from scipy.special import ndtr, ndtri

    distance = sigma * sigmas
    p = float(ndtr(abs(sigmas)))
    true = max(abs(distance) - sigma * float(ndtri(1 / (2 * alpha))), 0.0)
    ours, theirs = float(radii.one_sided(p, sigma, alpha)), float(radii.paper(p, 1 - p, sigma, alpha))
    assert ours <= true + 1e-12 and theirs <= true + 1e-12
    assert ours == pytest.approx(true, abs=1e-6)
    h = torch.tensor([[p, 1 - p]], dtype=torch.float64)
    lip = lipschitz_radius(h, torch.full((2,), lipschitz.gaussian_constant(sigma)), alpha).item()
    assert lip <= true + 1e-9


def test_alpha_for_a_clean_accuracy() -> None:
    """Four images: g is right on all, h on the first two; each step of alpha hands one more to g."""
    base = mixture.Base(0.5, chosen=np.array([0, 1, 1, 1]), lower=np.array([0.9, 0.9, 0.7, 0.6]),
                        accurate=np.array([0, 1, 0, 0]), gap=np.array([0.0, 0.0, 0.5, 0.2]),
                        labels=np.array([0, 1, 0, 0]))
    assert mixture.clean_accuracy(base, 1.0) == 0.5 and mixture.alpha_for(base, 0.5) == 1.0
    alpha = mixture.alpha_for(base, 0.75)
    assert alpha == pytest.approx(1 / 1.2) and mixture.clean_accuracy(base, alpha) == 0.75
    assert mixture.clean_accuracy(base, mixture.alpha_for(base, 1.0)) == 1.0
    wrong = mixture.Base(0.5, base.chosen, base.lower, 1 - base.accurate, base.gap, base.labels)
    with pytest.raises(InputError, match="`clean` must be reachable"):
        mixture.alpha_for(wrong, 0.9)


def test_frontier_is_the_best_of_all_pairs() -> None:
    x = images(300)
    labels = (x.flatten() > 0.5).long()
    bases = []
    for sigma in (0.1, 0.3):
        found = certify(Bins((0.0, 1.0)), x, plan=SmoothingPlan(sigma, samples=2000), stream=chance(300),
                        engine=Engine(batch_size=1 << 15))
        bases.append(mixture.Base.of(found, sigma, labels, labels))
    reach, alphas = np.linspace(0, 0.5, 11), [mixture.alpha_for(base, 0.97) for base in bases]
    best, which = mixture.frontier(list(zip(bases, alphas, strict=True)), reach)
    assert (np.diff(best) <= 0).all() and len(which) == 11 and set(which) == {0, 1}
    for base, alpha in zip(bases, alphas, strict=True):
        assert mixture.clean_accuracy(base, alpha) >= 0.97
        assert (best >= [(base.radius(alpha) >= max(r, 1e-300)).mean() for r in reach]).all()
        for theorem in ("A.2", "3.5"):
            assert (base.radius(alpha) >= base.radius(alpha, theorem) - 1e-9).all()


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.floats(0.05, 2), alphas)
def test_the_lipschitz_radius_of_a_bound(p: float, sigma: float, alpha: float) -> None:
    """Theorem 3.5 with the paper's constant and h_i ≤ 1 − p; never above ours."""
    h = torch.tensor([[p, 1 - p]], dtype=torch.float64) if p >= 0.5 else torch.tensor([[0.5, 0.5]]).double()
    constants = torch.full((2,), lipschitz.gaussian_constant(sigma, paper=True), dtype=torch.float64)
    found = float(radii.lipschitz(p, sigma, alpha))
    assert found == pytest.approx(float(lipschitz_radius(h, constants, alpha)), abs=1e-7)
    assert found <= radii.one_sided(p, sigma, alpha) + 1e-9


def test_answer_follows_whoever_wins() -> None:
    n = np.full(3, 1000.0)
    votes = np.array([[900.0, 50.0, 50.0], [550.0, 400.0, 50.0], [620.0, 300.0, 80.0]])
    chosen, accurate = np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64)
    # (1 − .7)/.7 = .43: a margin of .85 holds, .15 is lost to g, .32 as well.
    assert mixture.answer(votes, n, chosen, accurate, 0.7, 0.001).tolist() == [0, 1, 1]
    # At alpha = .75 the margin needed is .333, too near to .32 for a thousand votes.
    assert mixture.answer(votes, n, chosen, accurate, 0.75, 0.001).tolist()[2] == ABSTAIN
    assert mixture.answer(votes, n, chosen, chosen, 0.7, 0.001).tolist() == [0, 0, 0]


def test_local_estimate_on_a_linear_model(linear: torch.nn.Module) -> None:
    x = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    threat = Threat("l2", 0.05)
    from equipoise.core import rng

    found = lipschitz.estimate_local(linear, x, threat=threat, stream=rng.stream(0, "local", torch.arange(4)))
    assert found.constants.shape == (4, 6) and (found.constants >= 0).all()
    # The search can never meet a larger change than the steepest slope of a softmax allows: max ‖w_i − w_j‖ / 4 · 2.
    weight = next(linear.parameters())
    spread = torch.cdist(weight, weight).max()
    assert (found.constants <= spread / 2 + 1e-9).all() and found.constants.max() > 0.05 * spread
    assert found.averaged.shape == (4,)
    kept = found.holds(0.9)
    assert torch.equal(kept, found.margins >= radii.lemma_margin(0.9))
    # Where a random search already breaks the margin, the estimate must not claim to hold.
    for seed in range(20):
        moved = geometry.draw(x, threat, rng.stream(seed, "search", torch.arange(4)))
        p = torch.softmax(linear(moved), dim=1)
        fell = found.probabilities.argmax(dim=1) != p.argmax(dim=1)
        assert not (fell & kept).any()


def test_margin_statistics() -> None:
    found = lipschitz.margin_statistics(torch.tensor([-0.5, 0.1, 0.3, 0.9]), 0.8)
    assert found.mean == pytest.approx(0.2) and found.share_above == 0.5 and found.n == 4
    with pytest.raises(InputError):
        lipschitz.margin_statistics(torch.zeros(0), 0.8)


def test_lipschitz_radius_is_never_rounded_up() -> None:
    """Against whole fractions of the same numbers, also where they come in single precision."""
    from fractions import Fraction

    h = softmax(5, 400, 3, 4.0).float()
    constants = torch.tensor([0.3, 0.7, 1.1])
    for row, radius in zip(h.tolist(), lipschitz_radius(h, constants, 0.8).tolist(), strict=True):
        y = row.index(max(row))
        weight, each = Fraction(0.8), [Fraction(value) for value in constants.tolist()]
        true = min((Fraction(row[y]) - Fraction(row[i]) - (1 - weight) / weight) / (each[y] + each[i])
                   for i in range(3) if i != y)
        assert radius == 0 or Fraction(radius) < true
        assert radius >= float(true) - 1e-11


def test_alpha_for_a_gap_near_one() -> None:
    """Mean probabilities may leave a gap next to 1; alpha stays in [0.5, 1]."""
    base = mixture.Base(0.5, np.array([1]), np.array([0.9]), np.array([0]), np.array([1 - 1e-10]), np.array([0]))
    assert mixture.most_clean(base) == 1 and mixture.alpha_for(base, 1.0) == 0.5


def test_bad_constants() -> None:
    with pytest.raises(InputError, match=r"`probabilities` must lie in \[0, 1\]"):
        lipschitz_radius(torch.tensor([[3.0, -1.0]]), torch.tensor([1.0, 1.0]), 0.8)
    with pytest.raises(InputError, match="`constants` must not be negative"):
        lipschitz_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([1.0, -1.0]), 0.8)
    with pytest.raises(InputError, match="`alpha` must lie"):
        lipschitz_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([1.0, 1.0]), 0.4)
