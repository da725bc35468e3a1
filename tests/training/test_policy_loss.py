"""The loss of the policy: its two factors, its kinds of images, and that it learns whom to trust."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.data.dataset import whole_split
from equipoise.local_smoothing.policy import AdaptiveSmoothing
from equipoise.models import build
from equipoise.training import TrainingPlan, train
from equipoise.training.objectives.policy import PolicyLoss

B, C, H, W, K = 64, 1, 8, 8, 4


def _model() -> AdaptiveSmoothing:
    g, h = (build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval() for seed in (1, 2))
    return AdaptiveSmoothing(g, h, example=torch.rand(1, C, H, W), width=4, trust="constant")


def _images() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.rand(B, C, H, W, generator=chance), torch.randint(0, K, (B,), generator=chance)


def _stream() -> rng.Stream:
    return rng.stream(0, "test", torch.arange(B))


def test_kinds_come_in_their_shares_and_targets_in_equal_ones() -> None:
    many = rng.stream(0, "kinds", torch.arange(9000))
    kind, target = PolicyLoss(clean=0.2, own=0.3).kinds(many)
    share = torch.bincount(kind, minlength=3) / len(many)
    assert share.tolist() == pytest.approx([0.2, 0.3, 0.5], abs=0.02)
    counts = torch.unique(target, return_counts=True)[1]
    assert len(counts) == 9 and counts.min() > 900


def test_the_loss_is_its_formula() -> None:
    model, (x, y) = _model(), _images()
    nn.init.normal_(model.policy.fc.weight, std=2.0)
    model.train()
    objective = PolicyLoss(gamma_0=10.0, eps=0.05, steps=2)
    kind, target = objective.kinds(_stream())
    x_adv = objective.attack(model, x, y, target, kind, _stream())
    out = objective(model, x, y, _stream(), {})
    logits, beta = model.both(x_adv)
    for row in range(B):
        direct = F.cross_entropy(logits[row : row + 1], y[row : row + 1])
        if int(kind[row]) == 1:
            wanted = direct
        else:
            # Clean images and attacks beyond γ_0 want g (a small β); attacks up to it want h.
            side = 1 if int(kind[row]) == 2 and float(target[row]) <= 10 else -1
            wanted = (direct + 0.5) * (0.8 + torch.relu(3.2 - side * beta[row]))
        torch.testing.assert_close(out.losses[row], wanted, rtol=1e-4, atol=1e-4)
    assert out.losses.requires_grad


def test_images_are_attacked_as_their_kind_asks() -> None:
    model, (x, y) = _model().train(), _images()
    objective = PolicyLoss(eps=0.05, steps=4)
    kind, target = objective.kinds(_stream())
    moved = (objective.attack(model, x, y, target, kind, _stream()) - x).abs().flatten(1).amax(dim=1)
    assert bool((moved[kind == 0] == 0).all()) and bool((moved[kind != 0] > 0).all())
    assert float(moved.max()) <= 0.05 + 1e-6
    stride = 2.5 * 0.05 / 4  # a random number of steps: some of the policy's own have made only one
    assert bool((moved[kind == 1] < 1.01 * stride).any()) and bool((moved[kind == 2] > 1.01 * stride).any())
    assert model.policy.training  # as before


@pytest.mark.parametrize(("kind", "gamma_0", "side"), [("clean", 10.0, -1), ("aimed", 1e9, 1), ("aimed", 1e-9, -1)])
def test_it_learns_whom_to_trust(kind: str, gamma_0: float, side: int) -> None:
    """Clean images: g. Attacks that aim at γ_t: h where nearly all are up to γ_0, g where nearly all are beyond."""
    x, y = _images()
    data = whole_split("noise", "train", (x * 255).to(torch.uint8), y, tuple("abcd"))
    model = _model()
    before = {key: value.clone() for key, value in model.rule.state_dict().items()}
    plan = TrainingPlan(epochs=15, batch_size=32, optimizer="adamw", lr=0.02, held_out=0, weight_decay=0.0)
    train(model, PolicyLoss(clean=float(kind == "clean"), own=0.0, gamma_0=gamma_0, eps=0.1, steps=1), data, plan)
    assert bool((side * model.both(x)[1] > 1).all())
    assert all(torch.equal(value, before[key]) for key, value in model.rule.state_dict().items())
