from __future__ import annotations

import numpy as np
import torch
from closed_form import Bins, Probit, chance, images
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from equipoise.certification import Engine, SmoothingPlan, certify, radii, sequential

TWO = Bins((0.0, 1.0))
FAST = Engine(batch_size=1 << 16)


@settings(deadline=None, max_examples=200)
@given(st.integers(5, 10**6), st.lists(st.integers(5, 10**6), min_size=1, max_size=5))
def test_the_looks_share_one_failure(samples: int, firsts: list[int]) -> None:
    first = np.minimum(np.array(firsts), samples)
    sizes, shares = sequential.schedule(first, samples)
    assert (shares.sum(axis=1) <= 1 + 1e-12).all() and (shares.sum(axis=1) >= 0.999).all()
    looked = shares > 0
    for size, look in zip(sizes, looked, strict=True):
        mine = size[look]
        assert (np.diff(mine) > 0).all() or len(mine) == 1
        assert mine[-1] == samples and look[: len(mine)].all()


def test_tolerance_is_the_loss_against_all_samples() -> None:
    """On 300 images: each radius ends within about the tolerance of its full run, the mean well within."""
    x, stream = images(300), chance(300)
    full = certify(TWO, x, plan=SmoothingPlan(0.3, samples=10_000), stream=stream, engine=FAST)
    for tolerance, factor in ((0.04, 2.5), (0.02, 1.3)):
        plan = SmoothingPlan(0.3, samples=10_000, tolerance=tolerance)
        found = certify(TWO, x, plan=plan, stream=chance(300, seed=1), engine=FAST)
        loss = full.radius - found.radius
        assert loss.mean() < tolerance and loss.quantile(0.98) < 3 * tolerance
        assert full.samples.sum() > factor * found.samples.sum()


def test_decides_a_radius() -> None:
    x = images(300)
    plan = SmoothingPlan(0.3, samples=50_000, decide_radius=0.2)
    found = certify(TWO, x, plan=plan, stream=chance(300), engine=FAST)
    distance = (x.flatten() - 0.5).abs()
    clear = (distance - 0.2).abs() > 0.03
    assert torch.equal((found.radius >= 0.2)[clear], (distance > 0.2)[clear])
    assert found.samples[clear].double().mean() < 5000


def test_a_class_that_cannot_win_ends_early() -> None:
    x = torch.full((40, 1, 1, 1), 0.5)
    model = Bins((0.1, 0.4, 0.6, 0.9))
    assert model.smoothed(x[:1], 0.5).max() < 0.4
    found = certify(model, x, plan=SmoothingPlan(0.5, samples=100_000, tolerance=0.01), stream=chance(40), engine=FAST)
    assert (found.predicted == -1).all() and found.samples.max() < 3000


def test_foreseen_numbers() -> None:
    """Near certainty all samples are wanted, in the middle few; a smaller tolerance wants more."""
    shares = np.array([[ndtr(z), 1 - ndtr(z)] for z in (0.5, 1.5, 3.0, 4.5)])
    chosen = np.zeros(4, dtype=np.int64)
    wanted = {}
    for tolerance in (0.05, 0.01):
        plan = SmoothingPlan(0.5, tolerance=tolerance)
        goal = sequential.goal_of(plan, radii.Rule.of(plan))
        assert goal is not None
        wanted[tolerance] = goal.wanted(shares, chosen)
    assert (np.diff(wanted[0.05]) > 0).all() and (wanted[0.01] > wanted[0.05]).all()
    assert wanted[0.05][0] < 2500 and wanted[0.05][3] > 60_000


def test_goal_of() -> None:
    assert sequential.goal_of(SmoothingPlan(0.5), radii.Rule(0.5)) is None


def test_soft_stops_early_too() -> None:
    x = images(30)
    plan = SmoothingPlan(0.3, samples=1500, soft=True)
    full = certify(Probit(0.1), x, plan=plan, stream=chance(30), engine=FAST)
    early = certify(Probit(0.1), x, plan=SmoothingPlan(0.3, samples=1500, soft=True, tolerance=0.05), stream=chance(30),
                    engine=FAST)
    assert early.samples.sum() < 0.8 * full.samples.sum()
    assert (full.radius - early.radius).mean() < 0.06
    decided = certify(Probit(0.1), x, plan=SmoothingPlan(0.3, samples=1500, soft=True, decide_radius=0.1), stream=chance(30),
                      engine=FAST)
    assert decided.samples.sum() < 0.8 * full.samples.sum()
