"""APGD on models whose optimum is known in closed form, in both norms; and its core with a radius
per image."""

from __future__ import annotations

import pytest
import torch
from attack_models import HardDecision, inner_images
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise.attacks import Apgd
from equipoise.attacks.apgd import apgd_maximize, checkpoint_intervals
from equipoise.core import geometry, losses
from equipoise.core.ascent import value_and_gradient
from equipoise.core.checks import InputError
from equipoise.core.threat import NORMS, Threat


class Bowl(nn.Module):
    """Logits (radius² − ‖x − c‖², 0): class 0 inside a Euclidean ball, class 1 outside."""

    def __init__(self, centre: Tensor, radius: float) -> None:
        super().__init__()
        self.centre, self.radius = centre, radius

    def forward(self, x: Tensor) -> Tensor:
        inside = self.radius**2 - (x - self.centre).flatten(1).square().sum(dim=1)
        return torch.stack([inside, torch.zeros_like(inside)], dim=1)


CENTRE = torch.full((3, 5, 7), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
@pytest.mark.parametrize("norm", NORMS)
def test_reaches_the_corner_of_a_linear_model(norm: str, loss: str) -> None:
    """Two classes: the lowest margin in the ball is margin − eps·‖w‖ in the dual norm."""
    weight = torch.zeros(2, 105, dtype=torch.float64)
    weight[1] = torch.randn(105, generator=generator(0), dtype=torch.float64)
    x, stream = inner_images(8)
    model = Linear(
        weight,
        torch.tensor([0.0, 8.0]).double()
        - (x.flatten(1) @ weight[1]).mean() * torch.tensor([0, 1]),
    )
    y = torch.ones(8, dtype=torch.int64)
    eps = 0.02 if norm == "linf" else 0.3  # too little to fool the model
    x_adv = Apgd(loss, steps=60)(model, x, y, threat=Threat(norm, eps), stream=stream)
    clean, reached = (losses.signed_margin(model(z), y) for z in (x, x_adv))
    assert bool((reached > 0).all())
    torch.testing.assert_close(
        reached, clean - eps * geometry.dual_norm(weight[1:], norm), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(("radius_offset", "expected"), [(-0.01, True), (0.01, False)])
def test_quadratic_model_in_euclidean_norm(radius_offset: float, expected: bool) -> None:
    """The farthest point of the ball around x is x + eps·(x − c)/‖x − c‖."""
    x, stream = inner_images(6)
    distance = (x - CENTRE).flatten(1).norm(dim=1)
    farthest = distance.min() + 1.2 if expected else distance.max() + 1.2
    bowl, y = Bowl(CENTRE, float(farthest) + radius_offset), torch.zeros(6, dtype=torch.int64)
    with torch.no_grad():
        broken = (
            bowl(Apgd(steps=40)(bowl, x, y, threat=Threat("l2", 1.2), stream=stream)).argmax(dim=1)
            == 1
        )
    assert broken.tolist() == [expected] * 6


def test_quadratic_model_in_the_largest_norm() -> None:
    """The farthest corner of the cube around x is x + eps·sign(x − c)."""
    x, stream = inner_images(6)
    x = x + 0.06 * (x - CENTRE).sign()  # so far from the centre that no other corner is a maximum
    farthest = (x + 0.05 * (x - CENTRE).sign() - CENTRE).flatten(1).norm(dim=1)
    bowl = Bowl(CENTRE, float(farthest.max()) + 0.5)
    x_adv = Apgd(steps=40)(
        bowl, x, torch.zeros(6, dtype=torch.int64), threat=Threat("linf", 0.05), stream=stream
    )
    torch.testing.assert_close(
        (x_adv - CENTRE).flatten(1).norm(dim=1), farthest, rtol=1e-6, atol=1e-6
    )


def test_loss_of_the_surrogate_can_be_followed(linear: Linear) -> None:
    x, stream = inner_images(4)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    attack = Apgd(steps=20, surrogate=linear, follow="surrogate")
    x_adv = attack(HardDecision(linear), x, y, threat=Threat("linf", 0.1), stream=stream)
    with torch.no_grad():
        assert bool((linear(x_adv).argmax(dim=1) != y).all())


def test_checkpoints_of_the_paper() -> None:
    intervals = {
        age: interval for age, interval in enumerate(checkpoint_intervals(100)) if interval
    }
    assert intervals == {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    assert checkpoint_intervals(5)[1] == 1


@pytest.mark.parametrize("norm", NORMS)
def test_core_maximises_with_a_radius_per_image(norm: str) -> None:
    """The largest value of w·x over a ball is w·x + eps·‖w‖ in the dual norm, for the eps of each
    image."""
    x, _ = inner_images(6)
    w = torch.randn(1, 3, 5, 7, generator=generator(1), dtype=torch.float64)
    eps = torch.linspace(0.01, 0.09, 6, dtype=torch.float64)
    best = apgd_maximize(
        value_and_gradient(lambda z: (w * z).sum(dim=(1, 2, 3))), x, x, norm=norm, eps=eps, steps=40
    )
    gain = (w * (best - x)).sum(dim=(1, 2, 3))
    torch.testing.assert_close(gain, eps * geometry.dual_norm(w, norm), rtol=1e-3, atol=0)
    assert bool((geometry.size(best - x, norm) <= eps * (1 + 1e-9)).all())


def test_core_gives_the_iterates_of_the_attack(linear: Linear) -> None:
    """One algorithm: from the same start, with the same radius for all, the best iterate has the
    same loss."""
    x, stream = inner_images(6)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat(
        "linf", 1e-3
    )  # too small to fool the model, so the attack also returns its best point
    attacked = Apgd("margin", steps=30)(linear, x, y, threat=threat, stream=stream)
    start = geometry.surface(x, threat, stream.at("apgd-margin@30"))
    best = apgd_maximize(
        value_and_gradient(lambda z: losses.margin_loss(linear(z), y)),
        x,
        start,
        norm="linf",
        eps=torch.full((6,), threat.eps, dtype=torch.float64),
        steps=30,
    )
    torch.testing.assert_close(
        losses.margin_loss(linear(attacked), y), losses.margin_loss(linear(best), y)
    )


@pytest.mark.parametrize("bad", [{"steps": 0}, {"restarts": 0}, {"loss": "mse"}])
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Apgd(**bad)  # type: ignore[arg-type]
