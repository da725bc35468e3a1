"""Target classes, and the verdicts of targeted attacks on linear models."""

from __future__ import annotations

import pytest
import torch
from attack_models import inner_images
from torch import nn

from conftest import Linear, generator
from equipoise.attacks import Apgd, Attack, Fab, TargetedApgd
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.targeted import MAX_RANKED, classes_by_distance, classes_by_logit
from equipoise.core import geometry
from equipoise.core.rng import stream
from equipoise.core.threat import NORMS, Threat


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("attack", "least_agreement"),
    [
        (Apgd("dlr", 60), 0.9),  # untargeted: the steepest way need not lead to the nearest class
        (TargetedApgd(steps=40, ranks=(1, 2, 3, 4, 5)), 1.0),
        (Fab(steps=20, ranks=(1, 2, 3, 4, 5)), 1.0),
    ],
    ids=["apgd", "targeted", "fab"],
)
def test_verdicts_on_a_linear_model(
    attack: Attack, least_agreement: float, norm: str, linear: Linear
) -> None:
    """An image is broken exactly if the nearest of the hyperplanes lies inside the ball."""
    x, numbers = inner_images(24)
    with torch.no_grad():
        z = linear(x)
    y = z.argmax(dim=1)
    gap = z.gather(1, y.unsqueeze(1)) - z
    w = linear.weight[y].unsqueeze(1) - linear.weight
    dual = geometry.dual_norm(w.flatten(0, 1), norm).view(24, 6).clamp_min(1e-12)
    distance = gap / dual
    if (
        norm == "l1"
    ):  # the box ends the change of a single pixel, so the smallest move is a linear programme
        moves = geometry.move_to_hyperplane(
            x.repeat_interleave(6, 0), -w.reshape(-1, 3, 5, 7), -gap.flatten(), norm
        )
        distance = geometry.size(moves, norm).view(24, 6)
    nearest = distance.scatter(1, y.unsqueeze(1), torch.inf).amin(dim=1).detach()
    eps = float(nearest.median()) * 1.0001
    clear = (nearest / eps - 1).abs() > 0.01
    with torch.no_grad():
        broken = (
            linear(attack(linear, x, y, threat=Threat(norm, eps), stream=numbers)).argmax(dim=1)
            != y
        )
    assert bool((broken <= (nearest <= eps)).all()), "nothing is broken that cannot be"
    assert float((broken == (nearest <= eps))[clear].double().mean()) >= least_agreement


def test_classes_by_logit_leave_the_true_class_out() -> None:
    z = torch.randn(9, 6, generator=generator(1))
    z[0] = -torch.inf
    z[0, 2] = 0
    y = torch.arange(9) % 6
    order = classes_by_logit(z, y)
    for row in range(9):
        others = [j for j in range(6) if j != int(y[row])]
        assert sorted(order[row].tolist()) == others
        if row:
            assert order[row].tolist() == sorted(others, key=lambda j: -float(z[row, j]))


@pytest.mark.parametrize(("order", "fooled"), [("logits", False), ("distance", True)])
def test_distance_order_prefers_the_sensitive_class(order: str, fooled: bool) -> None:
    """Class 1 has the higher logit, class 2 the nearer boundary."""
    weight = torch.zeros(3, 105, dtype=torch.float64)
    weight[1, 0], weight[2, :50] = 0.1, 1.0
    x, numbers = inner_images(4)
    bias = torch.tensor([5.0, 4.0, 3.0]).double() - torch.stack(
        [weight[k] @ x[0].flatten() for k in range(3)]
    )
    model, y = Linear(weight, bias), torch.zeros(4, dtype=torch.int64)
    x_adv = TargetedApgd(20, (1,), order)(model, x, y, threat=Threat("linf", 0.06), stream=numbers)
    with torch.no_grad():
        assert bool((model(x_adv).argmax(dim=1) == 2).all()) is fooled


def test_classes_by_distance_of_a_thousand_classes() -> None:
    """Exact for a linear model; computed once per image, for few of the classes."""
    layer = nn.Linear(105, 1000).requires_grad_(False)
    passes: list[int] = []
    net = nn.Sequential(nn.Flatten(), layer)
    net.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    x, y = torch.rand(6, 3, 5, 7, generator=generator(0)), torch.arange(6)
    source = GradientSource(net, GradientSettings(), "fp32", x)
    order = classes_by_distance(source, x, y, torch.arange(6), "l2")
    assert order.shape == (6, MAX_RANKED)
    with torch.no_grad():
        z, weight = net(x), layer.weight
    gap = (z.gather(1, y.view(-1, 1)) - z) / (weight[y].unsqueeze(1) - weight).norm(dim=2)
    candidates = classes_by_logit(z, y)[:, :MAX_RANKED]
    assert torch.equal(order, candidates.gather(1, gap.gather(1, candidates).argsort(dim=1)))
    passes.clear()
    assert (
        torch.equal(classes_by_distance(source, x, y, torch.arange(6), "l2"), order) and not passes
    )


def test_far_ranks_follow_the_logits() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(105, 50)).requires_grad_(False)
    x, y, numbers = (
        torch.rand(6, 3, 5, 7, generator=generator(0)),
        torch.arange(6),
        stream(0, "s", torch.arange(6)),
    )
    source = GradientSource(net, GradientSettings(), "fp32", x)
    rank = MAX_RANKED + 2
    (stage,) = TargetedApgd(3, (rank,), "distance").stages()
    search = stage.make_search(source, Threat("linf", 0.01), True)
    assert search is not None
    assert torch.equal(search.start(x, y, numbers).target, classes_by_logit(net(x), y)[:, rank - 1])
    (too_far,) = TargetedApgd(3, (50,)).stages()
    assert too_far.make_search(source, Threat("linf", 0.01), True) is None, (
        "there are 49 other classes"
    )
