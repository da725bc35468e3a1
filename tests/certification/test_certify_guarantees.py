"""A certificate may be wrong with probability `failure`: measured where the truth is known, 20,000 times each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from closed_form import Bins, Floats, Probit, chance, images, of
from numpy.typing import NDArray
from scipy.stats import binomtest

from equipoise.certification import ABSTAIN, Engine, SmoothingPlan, bounds, certify, predict, radii, sequential, soft
from equipoise.certification.sampler import Sampler

COUNT = 20_000
FAILURE = 0.05
SIGMA = 0.3
FAST = Engine(batch_size=1 << 17)
TWO, THREE = Bins((0.0, 1.0)), Bins((0.1, 0.6, 0.9))


def rarely(wrong: NDArray[np.bool_], *, at_least: float = 0.0) -> None:
    """As rare as promised by an exact binomial test; and not so rare that the test could not fail."""
    assert len(wrong) >= COUNT
    assert binomtest(int(wrong.sum()), len(wrong), FAILURE, alternative="greater").pvalue > 1e-4
    assert wrong.mean() >= at_least


def test_hard() -> None:
    x = images(COUNT)
    found = certify(TWO, x, plan=SmoothingPlan(SIGMA, samples=120, n0=10, failure=FAILURE), stream=chance(COUNT), engine=FAST)
    p = TWO.smoothed(x, SIGMA)
    rarely(found.lower.numpy() > of(p, found.chosen), at_least=FAILURE / 3)
    # The radius is wrong just when the bound is: the boundary of a linear model lies at exactly that distance.
    distance = np.where(found.chosen == (x.flatten() > 0.5), 1, -1) * np.abs(x.flatten().double().numpy() - 0.5)
    rarely(found.radius.numpy() > np.maximum(distance, 0))


def test_soft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft, "CANDIDATES", 40)
    x, model = images(COUNT), Probit(0.2)
    plan = SmoothingPlan(SIGMA, samples=120, n0=20, failure=FAILURE, soft=True)
    found = certify(model, x, plan=plan, stream=chance(COUNT), engine=Engine(batch_size=1 << 15))
    rarely(found.lower.numpy() > of(model.smoothed(x, SIGMA), found.chosen))
    assert (found.predicted != ABSTAIN).double().mean() > 0.5


def test_soft_at_a_candidate_that_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a bet is most easily won by luck: fair coins against the candidate ½, settled after every one of them."""
    monkeypatch.setattr(soft, "CANDIDATES", 2)
    bets = soft.Bets(COUNT, SmoothingPlan(SIGMA, samples=300, failure=FAILURE, soft=True), torch.device("cpu"))
    bets.stakes += 0.5
    coins = torch.rand(300, COUNT, generator=torch.Generator().manual_seed(4)) < 0.5
    everyone, live = torch.arange(COUNT), torch.ones(COUNT, dtype=torch.bool)
    for coin in coins:
        bets.wager(everyone, coin.double(), live)
        lower = bets.settle()
    rarely((lower >= 0.5).numpy(), at_least=FAILURE / 2)


@dataclass(frozen=True)
class GradientSource:
    """Looks early and never stops: with the best of all looks kept, that is stopping at the worst moment."""

    def wanted(self, shares: Floats, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(shares), 12)

    def reached(self, votes: Floats, n: Floats, chosen: NDArray[np.int64], radius: Floats) -> NDArray[np.bool_]:
        return np.zeros(len(votes), dtype=bool)


def test_sequential_against_the_worst_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "LEAST", 12)
    x, plan = images(COUNT), SmoothingPlan(SIGMA, samples=160, n0=10, failure=FAILURE, tolerance=0.05)
    rule = radii.Rule.of(plan)
    with torch.no_grad():
        found = sequential.certify(Sampler(TWO, x, chance(COUNT), plan, FAST), plan, rule, GradientSource())
    assert (found.samples == 170).all()
    rarely(found.lower.numpy() > of(TWO.smoothed(x, SIGMA), found.chosen), at_least=FAILURE / 5)


@pytest.mark.parametrize("plan", [
    SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06),
    SmoothingPlan(SIGMA, samples=600, n0=10, failure=FAILURE, decide_radius=0.1),
])
def test_sequential(plan: SmoothingPlan) -> None:
    x = images(COUNT, seed=1)
    found = certify(TWO, x, plan=plan, stream=chance(COUNT, 1), engine=FAST)
    rarely(found.lower.numpy() > of(TWO.smoothed(x, SIGMA), found.chosen))
    assert found.samples.double().mean() < 0.8 * plan.samples


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_mixture(alpha: float, both: bool) -> None:
    x = images(COUNT)
    plan = SmoothingPlan(SIGMA, samples=150, n0=20, failure=FAILURE, alpha=alpha, two_sided=both)
    found = certify(THREE, x, plan=plan, stream=chance(COUNT), engine=FAST)
    p = THREE.smoothed(x, SIGMA)
    own = of(p, found.chosen)
    others = np.where(np.arange(3)[None] == found.chosen.numpy()[:, None], 0, p).max(axis=1)
    true = radii.two_sided(own, others, SIGMA, alpha) if both else radii.one_sided(own, SIGMA, alpha)
    rarely(found.radius.numpy() > true + 1e-9)
    if not both:
        rarely(found.lower.numpy() > own, at_least=FAILURE / 5)


def test_both_bounds_at_once() -> None:
    """Two like classes and many small ones, so that the two sides fail nearly apart: together no more than promised."""
    p = np.array([0.2, 0.2, *[0.06] * 10])
    votes = np.random.default_rng(5).multinomial(2000, p, size=COUNT)
    low, high = bounds.of_counts(votes, np.zeros(COUNT, dtype=np.int64), 2000, FAILURE)
    rarely((low > p[0]) | (high < p[1]), at_least=FAILURE / 2)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_predict(alpha: float) -> None:
    """Wrong means another class than that of the mixture with the true probabilities; abstaining is not wrong."""
    x, accurate = images(COUNT), Bins((0.9, 0.6, 0.1))  # contradicts the smoothed side nearly everywhere
    plan = SmoothingPlan(SIGMA, samples=80, n0=20, failure=FAILURE, alpha=alpha)
    found = predict(THREE, x, plan=plan, stream=chance(COUNT), engine=FAST, accurate=accurate).numpy()
    mixed = alpha * THREE.smoothed(x, SIGMA) + (1 - alpha) * np.eye(3)[accurate(x).argmax(dim=1).numpy()]
    truth = mixed.argmax(axis=1)
    rarely((found != ABSTAIN) & (found != truth))
    assert (found == truth).mean() > 0.3
