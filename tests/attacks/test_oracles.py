"""Models whose optimum is known in closed form, in both norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise import attacks
from equipoise.attacks.apgd import checkpoints
from equipoise.attacks.engine import leg_length
from equipoise.attacks.hyperplane import onto
from equipoise.attacks.targeted import ranked
from equipoise.core import geometry, losses
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import NORMS, Threat


def _inner(count: int) -> tuple[Tensor, Stream]:
    """Images so far from 0 and 1 that the box never binds."""
    index = torch.arange(count)
    return stream(3, "inner", index).uniform(3, 5, 7, low=0.4, high=0.6).double(), stream(0, "attack", index)


def _dual(w: Tensor, norm: str) -> Tensor:
    return w.abs().sum(dim=1) if norm == "linf" else w.norm(dim=1)


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
@pytest.mark.parametrize("norm", NORMS)
def test_apgd_reaches_the_corner_of_a_linear_model(norm: str, loss: str) -> None:
    """Two classes: the lowest margin in the ball is margin − eps·‖w‖ in the dual norm."""
    weight = torch.zeros(2, 105, dtype=torch.float64)
    weight[1] = torch.randn(105, generator=generator(0), dtype=torch.float64)
    x, chance = _inner(8)
    model = Linear(weight, torch.tensor([0.0, 8.0]).double() - (x.flatten(1) @ weight[1]).mean() * torch.tensor([0, 1]))
    y = torch.ones(8, dtype=torch.int64)
    eps = 0.02 if norm == "linf" else 0.3  # too little to fool
    x_adv = attacks.apgd(model, x, y, threat=Threat(norm, eps), stream=chance, steps=60, loss=loss)
    clean, reached = (losses.signed_margin(model(z), y) for z in (x, x_adv))
    assert bool((reached > 0).all())
    torch.testing.assert_close(reached, clean - eps * _dual(weight[1:], norm), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["apgd", "targeted", "fab"])
def test_verdicts_on_a_linear_model(name: str, norm: str, linear: Linear) -> None:
    """An image is broken exactly if the nearest of the hyperplanes lies inside the ball."""
    x, chance = _inner(24)
    with torch.no_grad():
        z = linear(x)
    y = z.argmax(dim=1)
    gap = z.gather(1, y.unsqueeze(1)) - z
    w = linear.weight[y].unsqueeze(1) - linear.weight
    distance = (gap / _dual(w.flatten(0, 1), norm).view(24, 6).clamp_min(1e-12)).scatter(1, y.unsqueeze(1), torch.inf)
    nearest = distance.amin(dim=1).detach()
    eps = float(nearest.median()) * 1.0001
    decided = (nearest / eps - 1).abs() > 0.01
    attack: Callable[..., Tensor] = {
        "apgd": partial(attacks.apgd, steps=60, loss="dlr"), "targeted": partial(attacks.targeted, steps=40, targets=5),
        "fab": partial(attacks.fab, steps=20, targets=5)}[name]
    with torch.no_grad():
        broken = linear(attack(linear, x, y, threat=Threat(norm, eps), stream=chance)).argmax(dim=1) != y
    assert bool((broken <= (nearest <= eps)).all()), "nothing is broken that cannot be"
    if name == "apgd":  # untargeted: the steepest way need not lead to the nearest class
        assert float((broken == (nearest <= eps))[decided].double().mean()) >= 0.9
    else:
        assert torch.equal(broken[decided], (nearest <= eps)[decided])


class Bowl(nn.Module):
    """Logits (radius² − ‖x − c‖², 0): right inside a Euclidean ball, wrong outside."""

    def __init__(self, centre: Tensor, radius: float) -> None:
        super().__init__()
        self.centre, self.radius = centre, radius

    def forward(self, x: Tensor) -> Tensor:
        inside = self.radius**2 - (x - self.centre).flatten(1).square().sum(dim=1)
        return torch.stack([inside, torch.zeros_like(inside)], dim=1)


@pytest.mark.parametrize("name", ["apgd", "fab"])
def test_quadratic_model_in_euclidean_norm(name: str) -> None:
    """The farthest point of the ball around x is x + eps·(x − c)/‖x − c‖."""
    x, chance = _inner(6)
    centre, y = torch.full((3, 5, 7), 0.5, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    away = (x - centre).flatten(1).norm(dim=1)
    for offset, expected in ((-0.01, True), (0.01, False)):
        eps = float(1.2 - away.max()) + offset * 5 if not expected else 1.2
        bowl = Bowl(centre, float(away.min() + 1.2 + offset) if expected else float(away.max() + eps + 0.01))
        threat = Threat("l2", eps)
        attack: Callable[..., Tensor] = attacks.apgd if name == "apgd" else attacks.fab
        with torch.no_grad():
            broken = bowl(attack(bowl, x, y, threat=threat, stream=chance, steps=40)).argmax(dim=1) == 1
        assert bool(broken.all()) is expected


def test_quadratic_model_in_the_largest_norm() -> None:
    """The farthest corner of the cube around x is x + eps·sign(x − c)."""
    x, chance = _inner(6)
    centre, y = torch.full((3, 5, 7), 0.5, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    x = x + 0.06 * (x - centre).sign()  # so far from the centre that no other corner is a maximum
    corner = x + 0.05 * (x - centre).sign()
    farthest = (corner - centre).flatten(1).norm(dim=1)
    bowl = Bowl(centre, float(farthest.max()) + 0.5)
    x_adv = attacks.apgd(bowl, x, y, threat=Threat("linf", 0.05), stream=chance, steps=40)
    torch.testing.assert_close((x_adv - centre).flatten(1).norm(dim=1), farthest, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NORMS), st.integers(0, 99), st.floats(0.01, 30))
def test_projection_onto_a_hyperplane(norm: str, seed: int, scale: float) -> None:
    chance = generator(seed)
    x = torch.rand(4, 3, 5, 7, generator=chance, dtype=torch.float64)
    w = torch.randn(4, 3, 5, 7, generator=chance, dtype=torch.float64)
    w[:, 0, 0] = 0
    value = scale * torch.randn(4, generator=chance, dtype=torch.float64)
    move = onto(x, w, value, norm)
    landed = value + (w * move).sum(dim=(1, 2, 3))
    assert float((x + move).min()) >= -1e-12 and float((x + move).max()) <= 1 + 1e-12
    reach = torch.where((w * value.view(-1, 1, 1, 1)) > 0, w.abs() * x, w.abs() * (1 - x)).sum(dim=(1, 2, 3))
    reachable = reach > value.abs() * (1 + 1e-6)
    assert float(landed[reachable].abs().max()) < 1e-6 * max(scale, 1) if bool(reachable.any()) else True
    torch.testing.assert_close(landed.abs()[~reachable], (value.abs() - reach)[~reachable], rtol=1e-6, atol=1e-6)
    # Optimality: every other feasible move onto the plane is at least as large. Convexity makes nearby ones enough.
    for other in range(5):
        direction = torch.randn(x.shape, generator=generator(seed + other), dtype=torch.float64) * 0.01
        rival = (x + move + direction).clamp(0, 1) - x
        rival = rival + onto(x + rival, w, value + (w * rival).sum(dim=(1, 2, 3)), "l2")
        held = (value + (w * rival).sum(dim=(1, 2, 3))).abs() < 1e-7
        smaller = geometry.size(rival, norm) < geometry.size(move, norm) * (1 - 1e-6) - 1e-9
        assert not bool((smaller & held & reachable).any())


def test_checkpoints_of_the_paper() -> None:
    assert checkpoints(100) == {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    assert min(checkpoints(5)) == 1


@settings(deadline=None)
@given(st.integers(1, 6000))
def test_legs_cover_the_passes_with_little_waste(passes: int) -> None:
    leg = leg_length(passes)
    made = -(-passes // leg) * leg
    assert passes <= made < passes + leg and made <= passes * 1.2


def test_ranked_leaves_the_true_class_out() -> None:
    z = torch.randn(9, 6, generator=generator(1))
    z[0] = -torch.inf
    z[0, 2] = 0
    y = torch.arange(9) % 6
    order = ranked(z, y)
    for row in range(9):
        others = [j for j in range(6) if j != int(y[row])]
        assert sorted(order[row].tolist()) == others
        if row:
            assert order[row].tolist() == sorted(others, key=lambda j: -float(z[row, j]))


def test_losses_ignore_scale_and_shift() -> None:
    z = torch.randn(9, 6, generator=generator(2), dtype=torch.float64)
    y, t = torch.arange(9) % 6, (torch.arange(9) + 2) % 6
    torch.testing.assert_close(losses.dlr(3 * z + 5, y), losses.dlr(z, y))
    torch.testing.assert_close(losses.targeted_dlr(3 * z + 5, y, t), losses.targeted_dlr(z, y, t))
    assert torch.equal(losses.dlr(z, y) > 0, z.argmax(1) != y)


def test_distance_order_finds_the_sensitive_class() -> None:
    """Class 1 has the higher logit, class 2 the nearer boundary."""
    weight = torch.zeros(3, 105, dtype=torch.float64)
    weight[1, 0], weight[2, :50] = 0.1, 1.0
    x, chance = _inner(4)
    bias = torch.tensor([5.0, 4.0, 3.0]).double() - torch.stack([weight[k] @ x[0].flatten() for k in range(3)])
    model, y = Linear(weight, bias), torch.zeros(4, dtype=torch.int64)
    threat = Threat("linf", 0.06)
    for order, fooled in (("logits", False), ("distance", True)):
        x_adv = attacks.targeted(model, x, y, threat=threat, stream=chance, steps=20, targets=1, order=order)
        with torch.no_grad():
            assert bool((model(x_adv).argmax(dim=1) == 2).all()) is fooled
