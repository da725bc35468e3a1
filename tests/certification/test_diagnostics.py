from __future__ import annotations

from itertools import pairwise

import torch
from closed_form import Bins, images, random_stream
from torch import Tensor, nn

from equipoise.certification import AveragedClassifier, SamplerOptions, SmoothingPlan, diagnostics

TWO = Bins((0.0, 1.0))
PLAN = SmoothingPlan(0.2, samples=2000, n0=10)
FAST = SamplerOptions(batch_size=1 << 15)


def towards_the_other_class(x: Tensor, y: Tensor, radius: float) -> Tensor:
    step = torch.where(y == 1, -radius, radius).view(-1, 1, 1, 1)
    return (x + step).clamp(0, 1)


def test_vote_shares_estimate_the_class_probabilities() -> None:
    x = images(20)
    shares = diagnostics.vote_shares(TWO, x, PLAN, random_stream(20), FAST)
    assert (shares - torch.from_numpy(TWO.smoothed(x, 0.2))).abs().max() < 0.05
    assert torch.allclose(shares.sum(dim=1), torch.ones(20))


def test_confidence_falls_as_the_attack_grows() -> None:
    x = images(20)
    y = (x.flatten() > 0.5).long()
    true = [
        diagnostics.vote_shares(
            TWO, towards_the_other_class(x, y, radius), PLAN, random_stream(20), FAST
        ).gather(1, y.unsqueeze(1))
        for radius in (0.0, 0.1, 0.4)
    ]
    assert all((more < less + 0.02).all() for less, more in pairwise(true))


def test_mixing_ratio_is_where_the_line_crosses_the_boundary() -> None:
    x = torch.tensor([0.6, 0.9, 0.2, 0.7]).view(4, 1, 1, 1)
    x_adv = torch.tensor([0.0, 0.1, 0.0, 0.6]).view(4, 1, 1, 1)
    ratio = diagnostics.mixing_ratios(
        TWO,
        x,
        x_adv,
        torch.ones(4, dtype=torch.int64),
        plan=PLAN,
        stream=random_stream(4),
        options=FAST,
    )
    assert abs(ratio[0] - 1 / 6) < 0.03 and abs(ratio[1] - 0.5) < 0.03
    assert ratio[2] == 0 and ratio[3].isnan()


def test_averaged_classifier_is_differentiable_and_deterministic() -> None:
    model = AveragedClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(105, 6)), 0.3, (3, 5, 7), copies=5, seed=1
    )
    x = random_stream(4).at("pictures").uniform(3, 5, 7).requires_grad_()
    log_p = model(x)
    assert torch.equal(log_p, model(x)) and torch.allclose(log_p.exp().sum(dim=1), torch.ones(4))
    assert torch.autograd.grad(log_p[:, 2].sum(), x)[0].abs().sum() > 0
    mean = torch.stack([torch.softmax(model.model(x + z), dim=1) for z in model.noise]).mean(dim=0)
    assert torch.allclose(log_p.exp(), mean, atol=1e-6)


def test_attack_in_ball_moves_every_image_to_the_sphere() -> None:
    """A linear model has one best direction, away from the label: every image ends there,
    misclassified or not."""
    weight = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False))
    linear[1].weight.data = weight
    averaged = AveragedClassifier(linear, 0.1, (1, 1, 3), copies=4)
    x = torch.tensor([[0.5, 0.3, 0.5], [0.3, 0.6, 0.5]]).view(
        2, 1, 1, 3
    )  # the label is 0: one right, one wrong
    x_adv = diagnostics.attack_in_ball(averaged, x, torch.zeros(2, dtype=torch.int64), 0.2)
    expected = x + 0.2 * torch.tensor([-0.6, 0.8, 0.0]).view(1, 1, 1, 3)
    assert torch.allclose(x_adv, expected, atol=1e-5)
