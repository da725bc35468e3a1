from __future__ import annotations

from typing import Any

import numpy as np
import torch
from closed_form import Bins, images, random_stream
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from equipoise.certification import (
    ABSTAIN,
    SamplerOptions,
    SmoothingPlan,
    certify,
    radii,
    sequential,
)

TWO = Bins((0.0, 1.0))
FAST = SamplerOptions(batch_size=1 << 16)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(5, 10**6),
    st.lists(st.tuples(st.integers(5, 10**6), st.booleans()), min_size=1, max_size=5),
    st.sampled_from([{"tolerance": 0.05}, {"decide_radius": 0.2}]),
)
def test_the_stages_share_one_failure_probability(
    samples: int, rows: list[tuple[int, bool]], stopping: dict[str, Any]
) -> None:
    """With the spending of every stopping rule, all of the failure is divided among the stages and
    unanimous votes."""
    rule = sequential.stopping_rule(radii.VoteRule(SmoothingPlan(0.3, **stopping)))
    assert rule is not None
    first, unanimous = (
        np.minimum([size for size, _ in rows], samples),
        np.array([own for _, own in rows]),
    )
    spending = rule.spending(unanimous)
    sizes, shares = sequential.schedule(first, samples, spending)
    # A single stage has the whole failure probability, and no later stage at which votes could be
    # unanimous.
    total = shares.sum(axis=1) + np.where((shares > 0).sum(axis=1) > 1, spending.unanimous, 0)
    assert (total <= 1 + 1e-12).all() and (total >= 0.999).all()
    for size, used in zip(sizes, shares > 0, strict=True):
        own = size[used]
        assert (np.diff(own) > 0).all() or len(own) == 1
        assert own[-1] == samples and used[: len(own)].all()


def test_tolerance_is_the_loss_against_all_samples() -> None:
    """On 300 images: each radius ends within about the tolerance of its full run, the mean well
    within."""
    x, stream = images(300), random_stream(300)
    full = certify(TWO, x, plan=SmoothingPlan(0.3, samples=10_000), stream=stream, options=FAST)
    for tolerance, factor in ((0.04, 2.5), (0.02, 1.3)):
        plan = SmoothingPlan(0.3, samples=10_000, tolerance=tolerance)
        early = certify(TWO, x, plan=plan, stream=random_stream(300, seed=1), options=FAST)
        loss = full.radius - early.radius
        assert loss.mean() < tolerance and loss.quantile(0.98) < 3 * tolerance
        assert full.samples.sum() > factor * early.samples.sum()


def test_decides_a_radius() -> None:
    x = images(300)
    plan = SmoothingPlan(0.3, samples=50_000, decide_radius=0.2)
    certificate = certify(TWO, x, plan=plan, stream=random_stream(300), options=FAST)
    distance = (x.flatten() - 0.5).abs()
    clear = (distance - 0.2).abs() > 0.03
    assert torch.equal((certificate.radius >= 0.2)[clear], (distance > 0.2)[clear])
    assert certificate.samples[clear].double().mean() < 5000


def test_a_class_that_cannot_win_ends_early() -> None:
    x = torch.full((40, 1, 1, 1), 0.5)
    model = Bins((0.1, 0.4, 0.6, 0.9))
    assert model.smoothed(x[:1], 0.5).max() < 0.4
    plan = SmoothingPlan(0.5, samples=100_000, tolerance=0.01)
    certificate = certify(model, x, plan=plan, stream=random_stream(40), options=FAST)
    assert (certificate.predicted == ABSTAIN).all() and certificate.samples.max() < 3000


def test_one_pilot_where_all_samples_are_needed_anyway() -> None:
    """A tolerance that saves nothing costs no more than all samples."""
    plan = SmoothingPlan(0.3, samples=10_000, tolerance=1e-5)
    certificate = certify(TWO, images(40), plan=plan, stream=random_stream(40), options=FAST)
    assert certificate.samples.max() == plan.samples + plan.n0


def test_needed_samples() -> None:
    """Near certainty all samples are needed, in the middle few; a smaller tolerance needs more."""
    shares = np.array([[ndtr(z), 1 - ndtr(z)] for z in (0.5, 1.5, 3.0, 4.5)])
    needed = {}
    for tolerance in (0.05, 0.01):
        stopping = sequential.stopping_rule(radii.VoteRule(SmoothingPlan(0.5, tolerance=tolerance)))
        assert stopping is not None
        needed[tolerance] = stopping.needed(shares, np.zeros(4, dtype=np.int64), np.full(4, 0.95))
    assert (np.diff(needed[0.05]) > 0).all() and (needed[0.01] > needed[0.05]).all()
    assert needed[0.05][0] < 2500 and needed[0.05][3] > 60_000


def test_a_plan_without_tolerance_has_no_stopping_rule() -> None:
    assert sequential.stopping_rule(radii.VoteRule(SmoothingPlan(0.5))) is None
