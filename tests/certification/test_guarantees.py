"""Certificates are wrong with probability at most `failure`: measured on 20,000 images whose truth
is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closed_form import Bins, Floats, Probit, images, probability_of, random_stream
from numpy.typing import NDArray
from scipy.stats import binomtest

from equipoise.certification import (
    ABSTAIN,
    Sampler,
    SamplerOptions,
    SmoothingPlan,
    certify,
    mixture,
    predict,
    predict_from_certificate,
    radii,
    sequential,
    soft,
)

COUNT = 20_000
FAILURE = 0.05
SIGMA = 0.3
FAST = SamplerOptions(batch_size=1 << 17)
TWO, THREE = Bins((0.0, 1.0)), Bins((0.1, 0.6, 0.9))


def assert_rarely(wrong: NDArray[np.bool_], *, at_least: float = 0.0) -> None:
    """At most FAILURE, by an exact binomial test; and `at_least` so often, so that the test could
    fail."""
    assert len(wrong) >= COUNT
    assert binomtest(int(wrong.sum()), len(wrong), FAILURE, alternative="greater").pvalue > 1e-4
    assert wrong.mean() >= at_least


@pytest.mark.parametrize("randomized", [False, True])
def test_votes(randomized: bool) -> None:
    x, plan = (
        images(COUNT),
        SmoothingPlan(SIGMA, samples=120, n0=10, failure=FAILURE, randomized=randomized),
    )
    certificate = certify(TWO, x, plan=plan, stream=random_stream(COUNT), options=FAST)
    p = TWO.smoothed(x, SIGMA)
    assert_rarely(
        certificate.lower.numpy() > probability_of(p, certificate.top), at_least=FAILURE / 3
    )
    # The radius is wrong just when the bound is: the boundary of a linear model lies at exactly
    # that distance.
    sign = np.where(certificate.top == (x.flatten() > 0.5), 1, -1)
    distance = sign * np.abs(x.flatten().double().numpy() - 0.5)
    assert_rarely(certificate.radius.numpy() > np.maximum(distance, 0))


def test_soft() -> None:
    x, model = images(COUNT), Probit(0.2)
    plan = SmoothingPlan(SIGMA, samples=120, n0=20, failure=FAILURE, certificate="soft")
    with torch.no_grad():
        sampler = Sampler(model, x, random_stream(COUNT), plan, SamplerOptions(batch_size=1 << 15))
        certificate = soft.certify_mean_probabilities(sampler, plan, candidates=40)
    assert_rarely(
        certificate.lower.numpy() > probability_of(model.smoothed(x, SIGMA), certificate.top)
    )
    assert (certificate.predicted != ABSTAIN).double().mean() > 0.5


def test_soft_at_a_candidate_that_is_the_mean() -> None:
    """Where a bet is most easily won by luck: fair coins against the candidate ½, with a bound
    after every coin."""
    plan = SmoothingPlan(SIGMA, samples=300, failure=FAILURE, certificate="soft")
    bound = soft.BettingBound(COUNT, plan, torch.device("cpu"), candidates=2)
    bound.stakes += 0.5
    coins = torch.rand(300, COUNT, generator=torch.Generator().manual_seed(4)) < 0.5
    everyone, valid = torch.arange(COUNT), torch.ones(COUNT, dtype=torch.bool)
    for coin in coins:
        bound.bet(everyone, coin.double(), valid)
        lower = bound.lower()
    assert_rarely((lower >= 0.5).numpy(), at_least=FAILURE / 2)


class NeverStop:
    """Starts early and never stops: with the best radius of all stages kept, that is stopping at
    the worst moment."""

    margin = 1.0

    def spending(self, unanimous: NDArray[np.bool_]) -> sequential.Spending:
        return sequential.Spending(np.full(len(unanimous), 0.7), np.zeros(len(unanimous)))

    def needed(
        self, shares: Floats, top: NDArray[np.int64], first_share: Floats
    ) -> NDArray[np.int64]:
        return np.full(len(shares), 12)

    def is_met(
        self, votes: Floats, n: Floats, top: NDArray[np.int64], bounds: radii.ProbabilityBounds
    ) -> NDArray[np.bool_]:
        return np.zeros(len(votes), dtype=bool)


@pytest.mark.parametrize("randomized", [False, True])
def test_sequential_at_the_worst_moment(randomized: bool) -> None:
    x, plan = (
        images(COUNT),
        SmoothingPlan(
            SIGMA, samples=160, n0=10, failure=FAILURE, tolerance=0.05, randomized=randomized
        ),
    )
    with torch.no_grad():
        sampler = Sampler(TWO, x, random_stream(COUNT), plan, FAST)
        certificate = sequential.certify_in_stages(
            sampler, radii.VoteRule(plan), NeverStop(), smallest=12
        )
    assert (certificate.samples == 170).all()
    assert_rarely(
        certificate.lower.numpy() > probability_of(TWO.smoothed(x, SIGMA), certificate.top),
        at_least=FAILURE / 5,
    )


class StopAt(NeverStop):
    """Spends nearly all of the failure on unanimous votes, and stops at a certain number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def spending(self, unanimous: NDArray[np.bool_]) -> sequential.Spending:
        return sequential.Spending(np.full(len(unanimous), 0.01), np.full(len(unanimous), 0.98))

    def is_met(
        self, votes: Floats, n: Floats, top: NDArray[np.int64], bounds: radii.ProbabilityBounds
    ) -> NDArray[np.bool_]:
        return n >= self.size


class FakeVotes:
    """Votes for the first of two classes with a known probability, drawn without a model."""

    num_classes, probability_error = 2, 0.0

    def __init__(self, probability: Floats, randomized: bool) -> None:
        self.x, self.probability = torch.zeros(len(probability)), probability
        self.rng = np.random.default_rng(6)
        self.uniform = self.rng.random(len(probability)) if randomized else None

    def uniforms(self) -> Floats | None:
        return self.uniform

    def votes(self, purpose: str, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        n = (stop - start).numpy()
        own = self.rng.binomial(n, self.probability)
        return torch.from_numpy(np.stack((own, n - own), axis=1))


@pytest.mark.parametrize(
    ("randomized", "unanimous"), [(False, 0.9 * FAILURE), (True, 0.9 * FAILURE), (True, 0.2)]
)
@pytest.mark.parametrize("stage", [1, 5, -1])
def test_one_share_pays_for_unanimous_votes_at_all_stages(
    stage: int, randomized: bool, unanimous: float
) -> None:
    """Whoever knows at which stage the bound of unanimous votes passes the true probability stops
    there."""
    first, spending = np.array([12]), StopAt(0).spending(np.ones(1, dtype=bool))
    size = int(sequential.schedule(first, 160, spending, sequential.UNANIMOUS_GROWTH)[0][0][stage])
    probability = np.full(COUNT, unanimous ** (1 / size))
    plan = SmoothingPlan(
        SIGMA, samples=160, n0=10, failure=FAILURE, tolerance=0.05, randomized=randomized
    )
    sampler: Any = FakeVotes(probability, randomized)
    certificate = sequential.certify_in_stages(
        sampler, radii.VoteRule(plan), StopAt(size), smallest=12
    )
    own = np.where(certificate.top.numpy() == 0, probability, 1 - probability)
    assert_rarely(certificate.lower.numpy() > own, at_least=FAILURE / 3)


class OwnSpending(NeverStop):
    """Never stops, and divides the failure as a rule of the package does."""

    def __init__(self, plan: SmoothingPlan) -> None:
        rule = sequential.stopping_rule(radii.VoteRule(plan))
        assert rule is not None
        self.rule = rule

    def spending(self, unanimous: NDArray[np.bool_]) -> sequential.Spending:
        return self.rule.spending(unanimous)


@pytest.mark.parametrize(
    ("stopping", "share", "size"),
    [
        ({"tolerance": 0.05}, "first", 12),
        ({"tolerance": 0.05}, "unanimous", 160),
        ({"decide_radius": 0.1}, "first", 12),
    ],
)
def test_stages_share_the_failure_by_their_own_spending(
    stopping: dict[str, Any], share: str, size: int
) -> None:
    """At the probability where the bound of unanimous votes fails most often: at the first stage,
    or at the last."""
    plan = SmoothingPlan(SIGMA, samples=160, n0=10, failure=FAILURE, **stopping)
    rule = OwnSpending(plan)
    spent = getattr(rule.spending(np.ones(1, dtype=bool)), share)[0]
    probability = np.full(COUNT, (0.99 * spent * FAILURE) ** (1 / size))
    sampler: Any = FakeVotes(probability, randomized=False)
    certificate = sequential.certify_in_stages(sampler, radii.VoteRule(plan), rule, smallest=12)
    truth = np.where(certificate.top.numpy() == 0, probability, 1 - probability)
    assert_rarely(certificate.lower.numpy() > truth, at_least=FAILURE / 5)


class StopAtALead(NeverStop):
    """Stops as soon as the class that is wrong leads by so many standard deviations."""

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations

    def is_met(
        self, votes: Floats, n: Floats, top: NDArray[np.int64], bounds: radii.ProbabilityBounds
    ) -> NDArray[np.bool_]:
        return np.asarray(votes[:, 0] - votes[:, 1] >= self.deviations * np.sqrt(n))


@pytest.mark.parametrize("deviations", [2.0, 2.5])
def test_predictions_from_certificates_that_were_stopped_at_the_worst_moment(
    deviations: float,
) -> None:
    """The votes of a stage are tested with the share of that stage."""
    plan = SmoothingPlan(SIGMA, samples=1000, n0=10, failure=FAILURE, tolerance=0.05)
    sampler: Any = FakeVotes(np.full(COUNT, 0.5 - 1e-6), randomized=False)
    certificate = sequential.certify_in_stages(
        sampler, radii.VoteRule(plan), StopAtALead(deviations), smallest=12
    )
    assert (certificate.n < 1000).any()
    predicted = predict_from_certificate(certificate, plan).numpy()
    assert_rarely(predicted == 0, at_least=FAILURE / 10)
    careless = predict_from_certificate(
        replace(certificate, failure=torch.full((COUNT,), FAILURE)), plan
    ).numpy()
    assert (careless == 0).mean() > FAILURE, (
        "with the whole failure at every stage it would be wrong too often"
    )


@pytest.mark.parametrize(
    "plan",
    [
        SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06),
        SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06, randomized=True),
        SmoothingPlan(SIGMA, samples=600, n0=10, failure=FAILURE, decide_radius=0.1),
        SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06, alpha=0.8),
    ],
    ids=["tolerance", "randomized", "radius", "mixture"],
)
def test_predictions_from_stopped_certificates(plan: SmoothingPlan) -> None:
    """Images near the boundary, where the class is hard to tell."""
    x = 0.45 + 0.1 * images(COUNT, seed=2)
    certificate = certify(TWO, x, plan=plan, stream=random_stream(COUNT, 2), options=FAST)
    assert (certificate.n < plan.samples).double().mean() > 0.2
    accurate = torch.zeros(COUNT, dtype=torch.int64) if plan.alpha < 1 else None
    predicted = predict_from_certificate(certificate, plan, accurate).numpy()
    mixed = plan.alpha * TWO.smoothed(x, SIGMA) + (1 - plan.alpha) * np.eye(2)[0]
    assert_rarely((predicted != ABSTAIN) & (predicted != mixed.argmax(axis=1)))
    assert (predicted == mixed.argmax(axis=1)).mean() > 0.05


def test_a_third_class_wins_the_mixture() -> None:
    """Neither the class of h nor that of g may win then; all three are nearly as probable in the
    mixture."""
    alpha = 0.9
    margin, slip = radii.lemma_margin(alpha), 1e-4
    p = np.array([(1 + margin) / 3, (1 + margin) / 3 - margin - slip, (1 + margin) / 3 + slip])
    votes = np.random.default_rng(8).multinomial(300, p, size=COUNT).astype(float)
    top, accurate = np.zeros(COUNT, dtype=np.int64), np.ones(COUNT, dtype=np.int64)
    predicted = mixture.predict_from_votes(
        votes, np.full(COUNT, 300.0), top, accurate, alpha, FAILURE
    )
    assert_rarely(predicted != ABSTAIN, at_least=FAILURE / 20)


@pytest.mark.parametrize("share", [0.6, 0.9, 0.97])
def test_randomized_bounds_spend_the_failure_in_full(share: float) -> None:
    """Clopper and Pearson's are wrong less often where votes are few or nearly unanimous."""
    rng = np.random.default_rng(7)
    k, u = rng.binomial(200, share, COUNT), rng.random(COUNT)
    low, usual = (
        radii.randomized_lower_bound(k, 200, FAILURE, u),
        radii.lower_bound(k, 200, FAILURE),
    )
    assert_rarely(low > share, at_least=0.9 * FAILURE)
    assert (low >= usual - 1e-9).all() and (
        low <= radii.lower_bound(np.minimum(k + 1, 200), 200, FAILURE) + 1e-9
    )[k < 200].all()


@pytest.mark.parametrize(
    "plan",
    [
        SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06),
        SmoothingPlan(SIGMA, samples=400, n0=10, failure=FAILURE, tolerance=0.06, randomized=True),
        SmoothingPlan(SIGMA, samples=600, n0=10, failure=FAILURE, decide_radius=0.1),
        SmoothingPlan(
            SIGMA, samples=600, n0=10, failure=FAILURE, decide_radius=0.1, randomized=True
        ),
    ],
)
def test_sequential(plan: SmoothingPlan) -> None:
    x = images(COUNT, seed=1)
    certificate = certify(TWO, x, plan=plan, stream=random_stream(COUNT, 1), options=FAST)
    assert_rarely(
        certificate.lower.numpy() > probability_of(TWO.smoothed(x, SIGMA), certificate.top)
    )
    assert certificate.samples.double().mean() < 0.8 * plan.samples


@pytest.mark.parametrize(("two_sided", "randomized"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_mixture(alpha: float, two_sided: bool, randomized: bool) -> None:
    x = images(COUNT)
    plan = SmoothingPlan(
        SIGMA,
        samples=150,
        n0=20,
        failure=FAILURE,
        alpha=alpha,
        two_sided=two_sided,
        randomized=randomized,
    )
    certificate = certify(THREE, x, plan=plan, stream=random_stream(COUNT), options=FAST)
    p = THREE.smoothed(x, SIGMA)
    own = probability_of(p, certificate.top)
    others = np.where(np.arange(3)[None] == certificate.top.numpy()[:, None], 0, p).max(axis=1)
    true = (
        radii.two_sided(own, others, SIGMA, alpha)
        if two_sided
        else radii.one_sided(own, SIGMA, alpha)
    )
    assert_rarely(certificate.radius.numpy() > true + 1e-9)
    if not two_sided:
        assert_rarely(certificate.lower.numpy() > own, at_least=FAILURE / 5)


def test_both_bounds_at_once() -> None:
    """Two equal classes and many small ones, so that both sides fail almost independently: together
    at most FAILURE."""
    p = np.array([0.2, 0.2, *[0.06] * 10])
    votes = np.random.default_rng(5).multinomial(2000, p, size=COUNT)
    low, high = radii.two_sided_bounds(votes, np.zeros(COUNT, dtype=np.int64), 2000, FAILURE)
    assert_rarely((low > p[0]) | (high < p[1]), at_least=FAILURE / 2)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_predict(alpha: float) -> None:
    """Wrong means another class than that of the mixture with the true probabilities; abstaining is
    not wrong."""
    x, accurate = (
        images(COUNT),
        Bins((0.9, 0.6, 0.1)),
    )  # contradicts the smoothed side nearly everywhere
    plan = SmoothingPlan(SIGMA, samples=80, n0=20, failure=FAILURE, alpha=alpha)
    predicted = predict(
        THREE, x, plan=plan, stream=random_stream(COUNT), options=FAST, accurate=accurate
    ).numpy()
    mixed = (
        alpha * THREE.smoothed(x, SIGMA)
        + (1 - alpha) * np.eye(3)[accurate(x).argmax(dim=1).numpy()]
    )
    truth = mixed.argmax(axis=1)
    assert_rarely((predicted != ABSTAIN) & (predicted != truth))
    assert (predicted == truth).mean() > 0.3
