"""Ascent with momentum: closed forms on linear objectives, and the ball."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.momentum import MomentumSearch
from equipoise.core import geometry, rng
from equipoise.core.threat import Threat


class Linear(nn.Module):
    """Two classes with logits ±w·x."""

    def __init__(self, pixels: int = 12) -> None:
        super().__init__()
        weight = torch.randn(pixels, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        value = x.flatten(1) @ self.weight
        return torch.stack([value, -value], dim=1)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_linear_objective_ends_at_its_maximum_over_the_ball(norm: str) -> None:
    model, threat = Linear(), Threat(norm, {"linf": 0.1, "l2": 0.2, "l1": 0.3}[norm])
    x = 0.4 + 0.2 * torch.rand(
        5, 3, 2, 2, generator=torch.Generator().manual_seed(1)
    )  # the box does not matter
    y = torch.zeros(5, dtype=torch.int64)
    source = GradientSource(model, GradientSettings(), "fp32", x)
    stream = rng.stream(0, "attack", torch.arange(5))
    search = MomentumSearch(
        source,
        threat,
        60,
        "start",
        "down",
        lambda z, y, target: -z[:, 0],
        lambda x, y, stream: 1 - y,
    )
    state = search.advance(search.start(x, y, stream), stream, [0] * 5, search.passes)
    lowest = x.flatten(1) @ model.weight - threat.eps * geometry.dual_norm(
        model.weight.view(1, 3, 2, 2), norm
    )
    reached = state.nearest.flatten(1) @ model.weight
    assert bool((geometry.size(state.nearest - x, norm) <= threat.eps * (1 + 1e-5)).all())
    torch.testing.assert_close(
        reached,
        lowest,
        rtol=0,
        atol=0.02 * threat.eps * float(geometry.dual_norm(model.weight.view(1, 3, 2, 2), norm)),
    )
    torch.testing.assert_close(state.logit_margin, 2 * reached, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("binary", [False, True])
def test_in_l1_the_best_pixels_reach_their_limit(eps: float, binary: bool) -> None:
    """The maximum changes about 2·eps of 3072 values, one after another, as far as [0, 1] allows.

    Steps that change too many values bring each only part of the way, and those that choose values
    at their limit change too few in all.
    """
    model, x = Linear(3072), torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    x, y = x.round() if binary else x, torch.zeros(4, dtype=torch.int64)
    source, stream = (
        GradientSource(model, GradientSettings(), "fp32", x),
        rng.stream(0, "attack", torch.arange(4)),
    )
    search = MomentumSearch(
        source,
        Threat("l1", eps),
        100,
        "start",
        "down",
        lambda z, y, target: -z[:, 0],
        lambda x, y, stream: 1 - y,
    )
    state = search.advance(search.start(x, y, stream), stream, [0] * 4, search.passes)
    weight, order = model.weight.abs().sort(descending=True)
    room = torch.where(model.weight > 0, x.flatten(1), 1 - x.flatten(1))[:, order]
    used = torch.minimum((eps - room.cumsum(dim=1) + room).clamp_min(0), room)
    gain = (x - state.nearest).flatten(1) @ model.weight
    assert bool((geometry.size(state.nearest - x, "l1") <= eps * (1 + 1e-5)).all())
    assert bool((gain >= 0.98 * (used @ weight)).all()), (
        "0.4 to 0.9 of it if steps change 5 % of the values"
    )


def test_points_after_the_last_pass_do_not_count() -> None:
    x, y = torch.full((2, 3, 2, 2), 0.5), torch.zeros(2, dtype=torch.int64)
    source, stream = (
        GradientSource(Linear(), GradientSettings(), "fp32", x),
        rng.stream(0, "attack", torch.arange(2)),
    )
    search = MomentumSearch(
        source,
        Threat("linf", 0.1),
        5,
        "start",
        "down",
        lambda z, y, target: -z[:, 0],
        lambda x, y, stream: 1 - y,
    )
    state = search.advance(search.start(x, y, stream), stream, [0, 0], search.passes)
    later = search.advance(state, stream, [6, 6], 9)
    assert torch.equal(later.nearest, state.nearest) and torch.equal(later.margin, state.margin)
