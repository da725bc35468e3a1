from __future__ import annotations

import pytest
import torch
from attack_models import inner_images

from conftest import Linear, generator
from equipoise.attacks import Apgd
from equipoise.attacks.sparse_ascent import (
    SparseAscent,
    observe_sparse,
    radius_phases,
    start_sparse,
    take_sparse_step,
)
from equipoise.core import geometry
from equipoise.core.threat import Threat


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 37, 100])
def test_phases_use_all_steps_and_end_in_the_ball(steps: int) -> None:
    phases = radius_phases(steps)
    assert sum(count for _, count in phases) == steps and all(count > 0 for _, count in phases)
    assert phases[-1][0] == 1


def test_a_checkpoint_sets_share_step_and_point() -> None:
    """Ten pixels of the best point are changed: a step then changes 10 / 1.5 of them, and others
    shrink their step."""
    x = torch.full((2, 1, 10, 10), 0.5, dtype=torch.float64)
    radius = torch.full((2,), 2.0, dtype=torch.float64)
    start = x.clone()
    start[:, 0, :2] += 0.05
    state = start_sparse(start, x, radius, torch.zeros(2, dtype=torch.int64))
    assert state.changed.tolist() == [20, 20] and state.step.tolist() == [2, 2]
    gradient = torch.randn(2, 1, 10, 10, generator=generator(0), dtype=torch.float64)
    state = observe_sparse(state, torch.zeros(2, dtype=torch.float64), gradient)
    moved = take_sparse_step(state, gradient, x, radius, 1)
    assert moved.step.tolist() == [2, 2], "no checkpoint before the first step"
    best = x.clone()
    best[0, 0, 0] += 0.1  # the first image has a sparser best point, the second the one from before
    best[1] = start[1]
    after = take_sparse_step(type(moved)(**{**vars(moved), "best": best}), gradient, x, radius, 1)
    torch.testing.assert_close(after.step, torch.tensor([2.0, 2 / 1.5], dtype=torch.float64))
    torch.testing.assert_close(after.share, torch.tensor([10 / 150, 20 / 150], dtype=torch.float64))
    seven = torch.tensor([0.075], dtype=torch.float64)  # 6.67 pixels are rounded up
    expected = best[:1] + 2 * geometry.steepest(state.best_gradient[:1], "l1", seven)
    torch.testing.assert_close(after.point[:1], geometry.project(expected, x[:1], Threat("l1", 2)))


def test_early_points_outside_the_ball_do_not_count(linear: Linear) -> None:
    """In the first phases points are three and two times as far away; the result is inside all the
    same."""
    x, numbers = inner_images(6)
    y = linear(x).argmax(dim=1)
    ascent = SparseAscent(1.0, 20, x.device)
    state = ascent.start(x, numbers)
    sizes, counted = [], []
    for age in range(ascent.passes + 3):
        sizes.append(geometry.size(state.point - x, "l1"))
        counted.append(ascent.counts(state))
        z = linear(state.point).detach()
        state = ascent.advance(
            state, x, z[:, 0], linear.weight[:1].detach().view(1, 3, 5, 7).expand_as(x), [age] * 6
        )
    assert ascent.passes == 23 and float(sizes[0].min()) > 2.9
    for age in range(ascent.passes + 3):
        assert bool((counted[age] == (14 <= age < 23)).all()), age
        assert float(sizes[age].max()) <= (3 if age < 7 else 2 if age < 14 else 1)
    x_adv = Apgd(steps=20)(linear, x, y, threat=Threat("l1", 1), stream=numbers)
    assert float(geometry.size(x_adv - x, "l1").max()) <= 1
