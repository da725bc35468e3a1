"""The objective of the policy: its formula, its kinds of images, and that it learns which
classifier to trust."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.data.dataset import whole_split
from equipoise.local_smoothing.policy import AdaptiveSmoothing
from equipoise.models import build
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objectives.gate import POLICY_ATTACK, TARGETED_ATTACK, PolicyLoss

B, C, H, W, K = 64, 1, 8, 8, 4


def adaptive_model() -> AdaptiveSmoothing:
    g, h = (
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval()
        for seed in (1, 2)
    )
    return AdaptiveSmoothing(g, h, example=torch.rand(1, C, H, W), width=4, trust="constant")


def images_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(B, C, H, W, generator=generator), torch.randint(
        0, K, (B,), generator=generator
    )


def stream() -> rng.Stream:
    return rng.stream(0, "test", torch.arange(B))


def test_kinds_of_images_and_targets_are_drawn() -> None:
    many = rng.stream(0, "kinds", torch.arange(9000))
    kinds, targets = PolicyLoss(clean_share=0.2, policy_share=0.3).draw_kinds(many)
    share = torch.bincount(kinds, minlength=3) / len(many)
    assert share.tolist() == pytest.approx([0.2, 0.3, 0.5], abs=0.02)
    counts = torch.unique(targets, return_counts=True)[1]
    assert len(counts) == 9 and counts.min() > 900


@pytest.mark.parametrize("loss", ["composite", "direct", "supervised"])
def test_the_loss_is_its_formula(loss: str) -> None:
    model, (x, y) = adaptive_model(), images_and_labels()
    nn.init.normal_(model.policy.fc.weight, std=2.0)
    model.train()
    objective = PolicyLoss(gamma_0=10.0, eps=0.05, steps=2, loss=loss)
    kinds, targets = objective.draw_kinds(stream())
    x_adv = objective.attack(model, x, y, targets, kinds, stream())
    output = objective(model, x, y, stream(), {})
    logits, beta = model.logits_and_beta(x_adv)
    ce = F.cross_entropy(logits, y, reduction="none")
    # Clean images and attacks with targets beyond γ_0 should trust g (a small β), other targeted
    # attacks h.
    side = torch.where((kinds == TARGETED_ATTACK) & (targets <= 10), 1, -1)
    hinge = torch.relu(3.2 - side * beta)
    expected = {
        "composite": torch.where(kinds == POLICY_ATTACK, ce, (ce + 0.5) * (0.8 + hinge)),
        "direct": ce,
        "supervised": torch.where(kinds == POLICY_ATTACK, 0.0, hinge),
    }[loss]
    torch.testing.assert_close(output.losses, expected, rtol=1e-4, atol=1e-4)
    assert output.losses.requires_grad


def test_images_are_attacked_according_to_their_kind() -> None:
    model, (x, y) = adaptive_model().train(), images_and_labels()
    objective = PolicyLoss(eps=0.05, steps=4)
    kinds, targets = objective.draw_kinds(stream())
    distance = (
        (objective.attack(model, x, y, targets, kinds, stream()) - x).abs().flatten(1).amax(dim=1)
    )
    assert bool((distance[kinds == 0] == 0).all()) and bool((distance[kinds != 0] > 0).all())
    assert float(distance.max()) <= 0.05 + 1e-6
    step = 2.5 * 0.05 / 4  # attacks through the policy have a random number of steps, some only one
    assert bool((distance[kinds == 1] < 1.01 * step).any()) and bool(
        (distance[kinds == 2] > 1.01 * step).any()
    )
    assert model.policy.training


@pytest.mark.parametrize(
    ("clean_share", "gamma_0", "side"),
    [(1.0, 10.0, -1), (0.0, 1e9, 1), (0.0, 1e-9, -1)],
    ids=["clean", "weak targets", "strong targets"],
)
def test_it_learns_which_classifier_to_trust(clean_share: float, gamma_0: float, side: int) -> None:
    """Clean images: g. Targeted attacks: h where nearly all targets are up to γ_0, g where nearly
    all are beyond."""
    x, y = images_and_labels()
    data = whole_split("noise", "train", (x * 255).to(torch.uint8), y, tuple("abcd"))
    model = adaptive_model()
    before = {key: value.clone() for key, value in model.rule.state_dict().items()}
    plan = TrainingPlan(
        epochs=15, batch_size=32, optimizer="adamw", lr=0.02, held_out=0, weight_decay=0.0
    )
    objective = PolicyLoss(
        clean_share=clean_share, policy_share=0.0, gamma_0=gamma_0, eps=0.1, steps=1
    )
    fit_model(model, objective, data, plan)
    assert bool((side * model.logits_and_beta(x)[1] > 1).all())
    assert all(torch.equal(value, before[key]) for key, value in model.rule.state_dict().items())
