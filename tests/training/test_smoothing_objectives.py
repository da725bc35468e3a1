"""Objectives for randomized smoothing where their values are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from small_objectives import LABELS, B, K, PlainNetwork, images, losses, stream
from torch import Tensor, nn

from equipoise.training.objectives import (
    MACER,
    Adversarial,
    Consistency,
    Gaussian,
    SmoothAdv,
    SmoothMix,
    Stability,
    Standard,
)
from equipoise.training.objectives.noisy_attacks import draw_noise, noisy_logits


def test_gaussian_is_the_cross_entropy_under_noise() -> None:
    model, x = PlainNetwork(), images()
    noise = draw_noise(x, 0.5, 3, stream())
    expected = torch.stack(
        [F.cross_entropy(model(x + noise[:, i]), LABELS, reduction="none") for i in range(3)]
    )
    torch.testing.assert_close(
        losses(Gaussian(sigma=0.5, noises=3), model, x, LABELS), expected.mean(dim=0)
    )


def test_stability_adds_the_cross_entropy_between_clean_and_noisy() -> None:
    model, x = PlainNetwork(), images()
    noise = draw_noise(x, 0.25, 1, stream())[:, 0]
    p, log_q = torch.softmax(model(x), dim=1), torch.log_softmax(model(x + noise), dim=1)
    expected = F.cross_entropy(model(x), LABELS, reduction="none") - 2 * (p * log_q).sum(dim=1)
    torch.testing.assert_close(losses(Stability(sigma=0.25), model, x, LABELS), expected)


def test_smoothadv_without_noise_is_adversarial_training() -> None:
    model, x = PlainNetwork(), images()
    plain = Adversarial(norm="l2", eps=0.7, steps=4, step_size=2 * 0.7 / 4, random_start=False)
    smoothed = SmoothAdv(sigma=0, noises=1, eps=0.7, steps=4, warmup_epochs=0)
    torch.testing.assert_close(losses(smoothed, model, x, LABELS), losses(plain, model, x, LABELS))
    assert (losses(plain, model, x, LABELS) > losses(Standard(), model, x, LABELS)).all()


def test_smoothadv_radius_grows() -> None:
    objective = SmoothAdv(eps=1.0, warmup_epochs=10)
    assert [objective.at_epoch(epoch, 30).eps for epoch in (0, 4, 9, 29)] == [0.1, 0.5, 1.0, 1.0]


def test_macer_hinge_of_known_probabilities() -> None:
    """Logits log p / β give softmax(β z) = p for every noise: the gap is Φ⁻¹(p₁) − Φ⁻¹(p₂)."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.05, 0.05, 0.9]], dtype=torch.float64)
    z = (p.log() / 16).unsqueeze(1).expand(3, 4, 3)
    first, second = (
        torch.tensor(values, dtype=torch.float64) for values in ((0.7, 0.9), (0.2, 0.05))
    )
    gap = torch.special.ndtri(first) - torch.special.ndtri(second)
    expected = torch.stack(
        [0.25 * (8 - gap[0]), torch.tensor(0.0, dtype=torch.float64), 0.25 * (8 - gap[1])]
    )
    hinge = MACER(sigma=0.5, gamma=8, beta=16, noises=4).hinge(z, torch.tensor([0, 0, 2]))
    torch.testing.assert_close(hinge, expected)


def test_macer_has_no_hinge_where_the_prediction_is_certain() -> None:
    z = torch.tensor([[[50.0, 0, 0]], [[0.01, 0.0, 0.0]]], requires_grad=True)
    hinge = MACER(sigma=0.5).hinge(z, torch.tensor([0, 0]))
    assert hinge[0] == 0 and hinge[1] > 0
    gradient = torch.autograd.grad(hinge.sum(), z)[0]
    assert (
        gradient.isfinite().all() and float(gradient[0].abs().max()) == 0 and gradient[1, 0, 0] < 0
    )


def test_macer_is_deferred() -> None:
    assert [MACER(weight=16, defer=31).at_epoch(epoch, 90).weight for epoch in (0, 30, 31)] == [
        0,
        0,
        16,
    ]


def test_consistency_of_equal_predictions_is_their_entropy() -> None:
    """Without noise there is no divergence, only η times the entropy."""
    model, x = PlainNetwork(), images(2)
    p = torch.softmax(model(x), dim=1)
    expected = losses(Standard(), model, x, LABELS) - 0.5 * (p * p.log()).sum(dim=1)
    torch.testing.assert_close(losses(Consistency(sigma=0, weight=5), model, x, LABELS), expected)


def test_consistency_divergence() -> None:
    model, x = PlainNetwork(), images()
    p = torch.softmax(noisy_logits(model, x, draw_noise(x, 1.0, 2, stream())), dim=2)
    average = p.mean(dim=1, keepdim=True)
    divergence = (average * (average.log() - p.log())).sum(dim=2).mean(dim=1)
    expected = losses(Gaussian(sigma=1.0, noises=2), model, x, LABELS) + 10 * divergence
    torch.testing.assert_close(
        losses(Consistency(sigma=1.0, weight=10, eta=0), model, x, LABELS), expected
    )


def test_smoothmix_without_mixed_images_is_gaussian() -> None:
    model, x = PlainNetwork(), images()
    mixed = losses(SmoothMix(sigma=0.5, noises=4, eta=0, warmup_epochs=0), model, x, LABELS)
    assert torch.equal(mixed, losses(Gaussian(sigma=0.5, noises=4), model, x, LABELS))


@pytest.mark.parametrize("form", ["code", "paper"])
def test_smoothmix_is_its_formula(form: str) -> None:
    """In the form of the code, images that are classified wrongly have no second term."""
    model, x, m = PlainNetwork(), images(), 3
    noise = draw_noise(x, 0.5, m, stream())
    average = torch.stack([torch.softmax(model(x + noise[:, i]), dim=1) for i in range(m)]).mean(
        dim=0
    )
    correct = torch.tensor([True, False, True, False])
    y = (average.argmax(dim=1) + ~correct) % K
    x_adv = x
    for _ in range(2):
        point = x_adv.clone().requires_grad_()
        p = torch.stack([torch.softmax(model(point + noise[:, i]), dim=1) for i in range(m)]).mean(
            dim=0
        )
        gradient = torch.autograd.grad(-p[torch.arange(B), y].log().sum(), point)[0]
        x_adv = (x_adv + 0.8 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(
            0, 1
        )
    lam = stream().at("ratio").uniform(high=0.5)
    mixed, target = (
        torch.lerp(x, x_adv, lam.view(-1, 1, 1, 1)),
        (1 - lam[:, None]) * average + lam[:, None] / K,
    )
    log_p = torch.stack([torch.log_softmax(model(mixed + noise[:, i]), dim=1) for i in range(m)])
    cross_entropy = -(target * log_p).sum(dim=2).mean(dim=0)
    divergence = cross_entropy + (target * target.log()).sum(dim=1)
    second = correct * divergence if form == "code" else cross_entropy
    objective = SmoothMix(
        sigma=0.5, noises=m, steps=2, step_size=0.8, eta=3, warmup_epochs=0, form=form
    )
    expected = losses(Gaussian(sigma=0.5, noises=m), model, x, y) + 3 * second
    torch.testing.assert_close(losses(objective, model, x, y), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("form", "carries_gradient"), [("code", True), ("paper", False)])
def test_smoothmix_target_carries_gradient_only_in_the_form_of_the_code(
    form: str, carries_gradient: bool
) -> None:
    model, x = PlainNetwork(), images()
    average = torch.softmax(
        torch.randn(B, K, generator=torch.Generator().manual_seed(0)), dim=1
    ).requires_grad_()
    noise = draw_noise(x, 0.5, 2, stream())
    value = SmoothMix(form=form).mixed_loss(model, x, x.flip(0), average, noise, stream()).sum()
    gradient = torch.autograd.grad(value, [average], allow_unused=True)[0]
    assert (gradient is not None and float(gradient.abs().sum()) > 0) == carries_gradient


def test_smoothmix_weight_and_first_step_grow() -> None:
    objective = SmoothMix(step_size=1.0, one_step=True, eta=5)
    early, late = objective.at_epoch(1, 90), objective.at_epoch(50, 90)
    assert early.one_step_norm == pytest.approx(0.2) and early.eta == pytest.approx(1.0)
    assert late.one_step_norm == 1.0 and late.eta == 5


def test_smoothmix_one_step_replaces_the_clean_image() -> None:
    inputs: list[Tensor] = []

    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = PlainNetwork()

        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x.detach())
            logits: Tensor = self.network(x)
            return logits

    x = torch.full_like(images(), 0.5)
    early = SmoothMix(step_size=1.0, one_step=True).at_epoch(1, 90)
    dataclasses.replace(early, sigma=0.0, noises=1, steps=3)(Recording(), x, LABELS, stream(), {})
    distance = (inputs[-2] - x).flatten(1).norm(dim=1)
    torch.testing.assert_close(distance, torch.full((B,), 0.2), rtol=1e-4, atol=1e-5)
