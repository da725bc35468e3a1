"""Attacks on the smoothed classifier inside of training, restated image by image."""

from __future__ import annotations

import math

import pytest
import torch
from small_objectives import LABELS, B, PlainNetwork, images, losses, stream
from torch import Tensor, nn

from equipoise.training.objectives import Consistency, Gaussian, SmoothAdv, SmoothMix
from equipoise.training.objectives.noisy_attacks import (
    clip_last,
    draw_noise,
    smoothed_ddn,
    smoothed_pgd,
)

M = 3


def gradient_of(model: nn.Module, x: Tensor, y: int, noise: Tensor) -> Tensor:
    """Gradient of −log of the averaged probability of y for one image (C, H, W) with its noises (M,
    C, H, W)."""
    point = x.clone().requires_grad_()
    p = torch.softmax(model(point + noise), dim=1).mean(dim=0)[y]
    return torch.autograd.grad(-p.log(), point)[0]


def restated_pgd(
    model: nn.Module, x: Tensor, y: int, noise: Tensor, eps: float, steps: int
) -> Tensor:
    """The SmoothAdv attack of the SmoothMix code: step, shrink to the ball, clip."""
    x_adv = x
    for _ in range(steps):
        gradient = gradient_of(model, x_adv, y, noise)
        delta = x_adv + 2 * eps / steps * gradient / gradient.norm() - x
        x_adv = (x + delta * min(1.0, eps / float(delta.norm()))).clamp(0, 1)
    return x_adv


def restated_ddn(
    model: nn.Module, x: Tensor, y: int, noise: Tensor, eps: float, steps: int, gamma: float
) -> Tensor:
    """The DDN of the SmoothAdv code, with the cosine learning rate of torch."""
    worst = float(torch.maximum(x, 1 - x).norm())
    norm, best_norm, best, delta = eps, worst, torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        predicted = int(model(x + delta + noise).argmax(dim=1).mode().values)
        if predicted != y and float(delta.norm()) < best_norm:
            best_norm, best = float(delta.norm()), delta
        gradient = gradient_of(model, x + delta, y, noise)
        rate = 0.01 + 0.99 * (1 + math.cos(math.pi * (step + 1) / steps)) / 2
        delta = delta + rate * gradient / gradient.norm()
        norm = min(norm * (1 - gamma if predicted != y else 1 + gamma), worst)
        delta = ((x + delta * norm / delta.norm()) * 255).round().div(255).clamp(0, 1) - x
    best = best * min(1.0, eps / max(float(best.norm()), 1e-12))
    return x + (best * 255).round() / 255


@pytest.mark.parametrize(("eps", "steps"), [(0.3, 4), (1.0, 8), (2.5, 10)])
def test_ddn_is_that_of_the_official_code(eps: float, steps: int) -> None:
    model, x = PlainNetwork().double(), images().double()
    noise = draw_noise(x, 0.5, M, stream())
    ours = smoothed_ddn(model, x, LABELS, noise, eps=eps, steps=steps, gamma=0.05)
    expected = torch.stack(
        [restated_ddn(model, x[i], int(LABELS[i]), noise[i], eps, steps, 0.05) for i in range(B)]
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    assert eps < 1 or (ours != x).any(), "at least one image is adversarial at a large radius"


def test_ddn_finds_the_boundary_of_a_linear_classifier() -> None:
    """The nearest misclassified image lies at the distance of the boundary, which DDN reaches up to
    its last step."""
    linear, x = nn.Linear(48, 2), torch.full((1, 3, 4, 4), 0.5)
    direction, distance = torch.ones(48) / 48**0.5, 0.4
    offset = distance - direction @ x.flatten()
    linear.weight.data = torch.stack((direction, -direction))
    linear.bias.data = torch.stack((offset, -offset))
    model = nn.Sequential(nn.Flatten(), linear)
    x_adv = smoothed_ddn(
        model, x, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 3, 4, 4), eps=2.0, steps=40
    )
    assert model(x).argmax() == 0 and model(x_adv).argmax() == 1
    assert (
        distance <= float((x_adv - x).norm()) < 1.06 * distance + 0.014
    )  # 8-bit levels move it by up to 0.014


def test_ddn_leaves_an_image_that_it_cannot_break() -> None:
    linear = nn.Linear(105, 6)
    linear.bias.data[0] = 1000.0
    model = nn.Sequential(nn.Flatten(), linear)
    x, y = images(), torch.zeros(B, dtype=torch.int64)
    assert torch.equal(
        smoothed_ddn(model, x, y, draw_noise(x, 0.5, M, stream()), eps=1.0, steps=5), x
    )


def test_smoothadv_with_ddn_trains_on_its_images() -> None:
    model, x = PlainNetwork(), images()
    noise = draw_noise(x, 0.5, M, stream())
    x_adv = smoothed_ddn(model, x, LABELS, noise, eps=1.0, steps=6, gamma=0.1)
    objective = SmoothAdv(
        sigma=0.5, noises=M, eps=1.0, steps=6, attack="ddn", gamma=0.1, warmup_epochs=0
    )
    torch.testing.assert_close(
        losses(objective, model, x, LABELS),
        losses(Gaussian(sigma=0.5, noises=M), model, x_adv, LABELS),
    )


def test_consistency_with_smoothadv_is_consistency_at_the_attacked_images() -> None:
    model, x = PlainNetwork(), images()
    noise = draw_noise(x, 0.5, M, stream())
    x_adv = torch.stack(
        [restated_pgd(model, x[i], int(LABELS[i]), noise[i], 0.9, 5) for i in range(B)]
    )
    both = Consistency(sigma=0.5, noises=M, weight=2.0, eps=0.9, steps=5, warmup_epochs=0)
    plain = Consistency(sigma=0.5, noises=M, weight=2.0)
    torch.testing.assert_close(
        losses(both, model, x, LABELS), losses(plain, model, x_adv, LABELS), rtol=1e-4, atol=1e-5
    )
    assert [Consistency(eps=1.0).at_epoch(epoch, 30).eps for epoch in (0, 4, 20)] == [0.1, 0.5, 1.0]
    assert Consistency().at_epoch(3, 30).eps is None


def test_max_norm_of_smoothmix_has_the_official_order_of_projections() -> None:
    """To the ball first, then to [0, 1]: at the border the iterate is shorter than the largest
    norm."""
    model, x = PlainNetwork(), (images() > 0.5).float()
    noise = draw_noise(x, 0.5, M, stream())
    expected = torch.stack(
        [restated_pgd(model, x[i], int(LABELS[i]), noise[i], 0.8, 4) for i in range(B)]
    )
    official, other = (
        smoothed_pgd(model, x, LABELS, noise, eps=0.8, step_size=0.4, steps=4, clips_last=last)[-1]
        for last in (True, False)
    )
    torch.testing.assert_close(official, expected, rtol=1e-4, atol=1e-5)
    assert (official - other).abs().max() > 1e-3
    points: list[Tensor] = []
    handle = model.register_forward_pre_hook(
        lambda module, arguments: points.append(arguments[0].detach())
    )
    losses(
        SmoothMix(sigma=0.5, noises=M, steps=4, step_size=0.4, max_norm=0.8, warmup_epochs=0),
        model,
        x,
        LABELS,
    )
    handle.remove()
    lam = stream().at("ratio").uniform(high=0.5).view(-1, 1, 1, 1)
    mixed = points[-1].view(B, M, *x.shape[1:]) - noise
    torch.testing.assert_close(mixed[:, 0], torch.lerp(x, expected, lam), rtol=1e-4, atol=1e-5)


def test_clip_last_without_a_ball_only_clips() -> None:
    x = images()
    assert torch.equal(clip_last(x + 0.7, x, None), (x + 0.7).clamp(0, 1))
    near = clip_last(x + 0.001, x, 5.0)
    torch.testing.assert_close(near, (x + 0.001).clamp(0, 1))
