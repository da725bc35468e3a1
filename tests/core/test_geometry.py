from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog
from torch import Tensor

from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.core.threat import NORMS, Threat

threats = st.one_of(
    st.builds(Threat, st.sampled_from(NORMS), st.floats(1e-3, 1)),
    st.builds(Threat, st.just("l2"), st.floats(1, 4)),
    st.builds(Threat, st.just("l1"), st.floats(1, 60)),
)


def _images(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return stream(seed, "images", torch.arange(4)).uniform(3, 5, 7).to(dtype)


@settings(deadline=None)
@given(
    threats,
    st.integers(0, 50),
    st.floats(0.01, 10),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_projection(threat: Threat, seed: int, scale: float, dtype: torch.dtype) -> None:
    x = _images(seed, dtype)
    far = x + scale * stream(seed, "step", torch.arange(4)).normal(3, 5, 7).to(dtype)
    near = geometry.project(far, x, threat)
    assert float(near.min()) >= 0 and float(near.max()) <= 1
    if threat.norm == "linf":
        assert float((near - x).abs().max()) <= threat.eps, (
            "exactly inside, in the dtype of the images"
        )
        assert torch.equal(geometry.project(near, x, threat), near), "idempotent"
    elif threat.norm == "l1":
        total = (near.double() - x.double()).abs().flatten(1).sum(dim=1)
        assert float(total.max()) <= threat.eps, "the sum of what the floats stand for"
        torch.testing.assert_close(geometry.project(near, x, threat), near)
    else:
        assert float(geometry.size(near - x, "l2").max()) <= threat.eps * (1 + 1e-6)
        torch.testing.assert_close(geometry.project(near, x, threat), near)


@settings(deadline=None)
@given(threats, st.integers(0, 50))
def test_projection_leaves_inner_points_alone(threat: Threat, seed: int) -> None:
    x = _images(seed)
    inside = geometry.draw(
        x, Threat(threat.norm, threat.eps / 2), stream(seed, "inner", torch.arange(4))
    )
    torch.testing.assert_close(geometry.project(inside, x, threat), inside, rtol=0, atol=1e-6)


def test_projection_onto_the_euclidean_ball_known_points() -> None:
    x = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    far = x + torch.tensor([[0.3, 0.4], [0.03, 0.04]], dtype=torch.float64).view(2, 1, 1, 2)
    near = geometry.project(far, x, Threat("l2", 0.1)) - x
    expected = torch.tensor([[0.06, 0.08], [0.03, 0.04]], dtype=torch.float64).view(2, 1, 1, 2)
    torch.testing.assert_close(near, expected)


def _expected_l1_projection(far: Tensor, x: Tensor, eps: float) -> Tensor:
    """By a root of Σ min(max(a − λ, 0), room) = eps, one image at a time."""
    delta = (far - x).numpy()
    room, change = np.where(delta > 0, 1 - x.numpy(), x.numpy()), np.abs(delta)

    def excess(cut: float) -> float:
        return float(np.minimum(np.maximum(change - cut, 0), room).sum() - eps)

    cut = 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0, change.max(), xtol=1e-14))
    return x + torch.from_numpy(np.sign(delta) * np.minimum(np.maximum(change - cut, 0), room))


@pytest.mark.parametrize("eps", [0.01, 0.5, 3.0, 20.0, 60.0])
@pytest.mark.parametrize("scale", [0.02, 0.5, 5.0])
def test_projection_onto_the_l1_ball_and_the_box_is_the_nearest_point(
    eps: float, scale: float
) -> None:
    x = _images(5, torch.float64)
    x[0].round_()  # pixels at the ends of their range
    step = stream(7, "step", torch.arange(4)).normal(3, 5, 7).double()
    step[1] = step[1].sign()  # ties
    far, threat = x + scale * step, Threat("l1", eps)
    near = geometry.project(far, x, threat)
    for row in range(4):
        torch.testing.assert_close(
            near[row], _expected_l1_projection(far[row], x[row], eps), rtol=0, atol=1e-12
        )
    single = geometry.project(far.float(), x.float(), threat)
    torch.testing.assert_close(single.double(), near, rtol=0, atol=2e-6 * max(scale, 1))
    for seed in range(20):  # no other feasible point lies on the side of `far`
        other = geometry.draw(x, threat, stream(seed, "other", torch.arange(4)))
        assert float(((far - near) * (other - near)).flatten(1).sum(dim=1).max()) <= 1e-10
    radii = torch.full((4,), eps, dtype=torch.float64)
    assert torch.equal(geometry.project_to_ball(far, x, "l1", radii), near), (
        "also where every image has a radius"
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 999), st.floats(0.01, 4))
def test_the_l1_move_to_a_hyperplane_solves_the_linear_programme(seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    x, w, value = random.uniform(size=8), random.normal(size=8), scale * random.normal()
    # The move is d = up − down with 0 ≤ up ≤ 1 − x and 0 ≤ down ≤ x.
    best = linprog(
        np.ones(16),
        A_eq=[[*w, *-w]],
        b_eq=[-value],
        bounds=[(0, 1 - v) for v in x] + [(0, v) for v in x],
    )
    images, normals = (torch.from_numpy(numbers).view(1, 2, 2, 2) for numbers in (x, w))
    values = torch.tensor([value], dtype=torch.float64)
    move = geometry.move_to_hyperplane(images, normals, values, "l1").numpy().ravel()
    assert (x + move).min() >= -1e-12 and (x + move).max() <= 1 + 1e-12
    if best.status == 2:  # no point of the box is on the plane: every pixel goes to its limit
        reach = np.where(w * value > 0, np.abs(w) * x, np.abs(w) * (1 - x)).sum()
        assert abs(abs(value + w @ move) - (abs(value) - reach)) < 1e-9
    else:
        assert abs(value + w @ move) < 1e-9
        assert np.abs(move).sum() <= best.fun + 1e-9


def test_an_l1_step_changes_the_given_share_of_the_pixels() -> None:
    gradient = stream(1, "gradient", torch.arange(3)).normal(2, 5, 10)
    step = geometry.steepest(gradient, "l1", torch.tensor([0.0, 0.101, 0.255]))
    assert (step != 0).flatten(1).sum(dim=1).tolist() == [1, 10, 25]
    torch.testing.assert_close(geometry.size(step, "l1"), torch.ones(3))
    for row in range(3):
        changed, magnitude = step[row] != 0, gradient[row].abs()
        assert float(magnitude[changed].min()) > float(magnitude[~changed].max())
        assert torch.equal(step[row].sign()[changed], gradient[row].sign()[changed])


@pytest.mark.parametrize("norm", NORMS)
def test_steepest_beats_every_random_direction(norm: str) -> None:
    gradient = stream(1, "gradient", torch.arange(4)).normal(3, 5, 7).double()
    step = geometry.steepest(gradient, norm)
    torch.testing.assert_close(geometry.size(step, norm), torch.ones(4, dtype=torch.float64))
    gain = (step * gradient).flatten(1).sum(1)
    for seed in range(50):
        other = stream(seed, "other", torch.arange(4)).normal(3, 5, 7).double()
        other = other / geometry.per_example(geometry.size(other, norm), other)
        assert bool(((other * gradient).flatten(1).sum(1) <= gain).all())


@pytest.mark.parametrize("norm", NORMS)
def test_zero_and_tiny_gradients(norm: str) -> None:
    gradient = torch.zeros(2, 3, 5, 7)
    gradient[1] = 1e-30
    step = geometry.steepest(gradient, norm)
    assert bool(step.isfinite().all())
    assert float(geometry.size(step, norm)[0]) == 0
    assert abs(float(geometry.size(step, norm)[1]) - 1) < 1e-5


@pytest.mark.parametrize("norm", NORMS)
def test_draw_fills_the_ball(norm: str) -> None:
    x = torch.full((2000, 1, 1, 2), 0.5)
    drawn = geometry.draw(x, Threat(norm, 0.2), stream(0, "draw", torch.arange(2000)))
    sizes = geometry.size(drawn - x, norm) / 0.2
    # Uniform in two dimensions: the share within radius r of the ball is r².
    for radius in (0.3, 0.6, 0.9):
        share = float((sizes <= radius).float().mean())
        assert abs(share - radius**2) < 5 * (radius**2 * (1 - radius**2) / 2000) ** 0.5


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NORMS), st.integers(0, 99), st.floats(0.01, 30))
def test_move_to_a_hyperplane(norm: str, seed: int, scale: float) -> None:
    def normal(number: int) -> Tensor:
        return torch.randn(
            4, 3, 5, 7, generator=torch.Generator().manual_seed(number), dtype=torch.float64
        )

    def value_after(move: Tensor) -> Tensor:
        return value + (w * move).sum(dim=(1, 2, 3))

    x, w, value = _images(seed, torch.float64), normal(seed), scale * normal(seed + 1)[:, 0, 0, 0]
    w[:, 0, 0] = 0
    move = geometry.move_to_hyperplane(x, w, value, norm)
    reached = value_after(move)
    assert float((x + move).min()) >= -1e-12 and float((x + move).max()) <= 1 + 1e-12
    reach = torch.where((w * value.view(-1, 1, 1, 1)) > 0, w.abs() * x, w.abs() * (1 - x)).sum(
        dim=(1, 2, 3)
    )
    reachable = reach > value.abs() * (1 + 1e-6)
    assert not bool((reached[reachable].abs() >= 1e-6 * max(scale, 1)).any())
    torch.testing.assert_close(
        reached.abs()[~reachable], (value.abs() - reach)[~reachable], rtol=1e-6, atol=1e-6
    )
    # Every other feasible move onto the plane is at least as large; by convexity, nearby ones are
    # enough.
    for number in range(5):
        other = (x + move + 0.01 * normal(seed + number)).clamp(0, 1) - x
        other = other + geometry.move_to_hyperplane(x + other, w, value_after(other), "l2")
        on_plane = value_after(other).abs() < 1e-7
        smaller = geometry.size(other, norm) < geometry.size(move, norm) * (1 - 1e-6) - 1e-9
        assert not bool((smaller & on_plane & reachable).any())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.5])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
def test_a_move_where_pixels_with_large_gradients_are_at_their_limit(
    norm: str, share: float, ratio: float
) -> None:
    """In float32 the small gradients of the free pixels must not drown in those of the others."""
    x, w = torch.full((1, 1, 4, 8), 0.5), torch.linspace(1, 2, 32).view(1, 1, 4, 8)
    x[..., :4], w[..., :4] = 0.01, w[..., :4] * ratio
    reach = (w * x).double().flatten(2).view(4, 8)
    value = (
        reach[:, :4].sum() + share * reach[:, 4:].sum()
    )  # what the others must gain is a share of what they can
    move = geometry.move_to_hyperplane(x, w, value.float().view(1), norm)
    gained = -(w.double() * move.double()).sum()
    wanted = torch.minimum(value, reach.sum())
    assert abs(float((gained - wanted) / wanted)) < 1e-6
    if share > 1:
        torch.testing.assert_close(move, -x)


@pytest.mark.parametrize("norm", NORMS)
def test_dual_norm_is_the_gain_of_the_steepest_step(norm: str) -> None:
    gradient = stream(1, "gradient", torch.arange(4)).normal(3, 5, 7).double()
    gain = (geometry.steepest(gradient, norm) * gradient).flatten(1).sum(1)
    torch.testing.assert_close(geometry.dual_norm(gradient, norm), gain)


@pytest.mark.parametrize("norm", NORMS)
def test_projection_with_known_bounds_is_the_same(norm: str) -> None:
    x, threat = _images(1), Threat(norm, 0.05)
    far = x + stream(1, "step", torch.arange(4)).normal(3, 5, 7)
    assert torch.equal(
        geometry.project(far, x, threat, *geometry.reusable_bounds(x, threat)),
        geometry.project(far, x, threat),
    )


@pytest.mark.parametrize(
    ("norm", "order"),
    [("linf", 1.0), ("l2", 2.0), ("l1", math.inf), (1, math.inf), (math.inf, 1.0), (1.5, 3.0)],
)
def test_dual_norm(norm: str | float, order: float) -> None:
    gradient = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert geometry.dual_order(norm) == order
    expected = torch.linalg.vector_norm(gradient.flatten(1), ord=order, dim=1)
    torch.testing.assert_close(geometry.dual_norm(gradient, norm), expected)


@pytest.mark.parametrize("norm", [0.5, "l3", None, True])
def test_an_unknown_norm_has_no_dual(norm: str | float) -> None:
    with pytest.raises(InputError, match="`norm` must be linf, l2, l1 or a number of at least 1"):
        geometry.dual_order(norm)
