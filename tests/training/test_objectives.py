"""The right value of every objective where it is known, and one contract over all of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.core.checks import InputError
from equipoise.core.geometry import project_to_ball
from equipoise.core.rng import Stream
from equipoise.training import OBJECTIVES, Objective, noise
from equipoise.training.inner_pgd import inner_pgd
from equipoise.training.objectives import (
    Adversarial,
    Consistency,
    Gaussian,
    Iaat,
    Macer,
    SmoothAdv,
    SmoothMix,
    Stability,
    Standard,
    Trades,
)

B, SHAPE, K = 4, (3, 5, 7), 6


class Small(nn.Module):
    """With batch norm and dropout-free, so that its two modes differ and it is deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 3 * 5, K)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))
        return found


class Plain(nn.Module):
    """Without batch norm: the loss of an image is a function of that image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(105, 20), nn.Linear(20, K)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.tanh(self.first(x.flatten(1))))
        return found


@pytest.fixture
def x() -> Tensor:
    return torch.rand(B, *SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def y() -> Tensor:
    return torch.tensor([0, 5, 2, 2])


def chance(seed: int = 0) -> Stream:
    return rng.stream(seed, "train", torch.arange(10, 10 + B))


def losses(objective: Objective, model: nn.Module, x: Tensor, y: Tensor, stream: Stream | None = None) -> Tensor:
    return objective(model, x, y, stream or chance(), objective.memory(len(x))).losses


QUICK: dict[str, dict[str, Any]] = {"macer": {"noises": 3}, "smoothmix": {"one_step": True}}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_contract(name: str, x: Tensor, y: Tensor) -> None:
    objective = OBJECTIVES[name](**QUICK.get(name, {})).at(20, 30)
    model = Small()
    model.norm.momentum = 0.0
    model.conv.weight.requires_grad_(False)
    model.norm.eval()
    modes = {key: module.training for key, module in model.named_modules()}
    flags = {key: p.requires_grad for key, p in model.named_parameters()}
    before, images, memory = torch.get_rng_state(), x.clone(), objective.memory(B)
    outcome = objective(model, x, y, chance(), memory)
    assert outcome.losses.shape == outcome.correct.shape == (B,)
    assert outcome.correct.dtype == torch.bool and outcome.losses.isfinite().all()
    assert not outcome.correct.requires_grad
    assert outcome.memory.keys() == memory.keys()
    assert all(value.shape == memory[key].shape and not value.requires_grad for key, value in outcome.memory.items())
    assert {key: module.training for key, module in model.named_modules()} == modes
    assert {key: p.requires_grad for key, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(x, images)
    gradients = torch.autograd.grad(outcome.losses.mean(), [model.fc.weight, model.norm.weight])
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)
    again = objective(model, x, y, chance(), memory)
    assert torch.equal(outcome.losses, again.losses)
    verdicts = objective.judge(model.eval(), x, y, chance())
    assert next(iter(verdicts)) == "clean"
    assert all(verdict.shape == (B,) and verdict.dtype == torch.bool for verdict in verdicts.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_of_an_image_does_not_depend_on_its_batch(name: str, x: Tensor, y: Tensor) -> None:
    objective, model = OBJECTIVES[name](**QUICK.get(name, {})).at(20, 30), Plain()
    whole = losses(objective, model, x, y)
    part = losses(objective, model, x[1:3], y[1:3], chance()[1:3])
    torch.testing.assert_close(part, whole[1:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"standard"}))
def test_chance_matters(name: str, x: Tensor, y: Tensor) -> None:
    objective, model = OBJECTIVES[name](**QUICK.get(name, {})).at(20, 30), Plain()
    assert not torch.allclose(losses(objective, model, x, y), losses(objective, model, x, y, chance(1)), rtol=1e-6)


def test_standard_and_label_smoothing(x: Tensor, y: Tensor) -> None:
    model = Plain()
    log_p = torch.log_softmax(model(x), dim=1)
    plain = -log_p[torch.arange(B), y]
    torch.testing.assert_close(losses(Standard(), model, x, y), plain)
    smoothed = 0.9 * plain - 0.1 * log_p.mean(dim=1)
    torch.testing.assert_close(losses(Standard(label_smoothing=0.1), model, x, y), smoothed)


def test_adversary_of_a_linear_model() -> None:
    """Two classes, ℓ∞: the margin falls by exactly eps·‖w‖₁ where no pixel leaves [0, 1]."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(105, 2, dtype=torch.float64))
    weight = next(iter(model.parameters())).detach()
    x, y = torch.full((B, *SHAPE), 0.5, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    objective = Adversarial(eps="8/255", steps=5)  # type: ignore[arg-type]
    z = model(x)
    gap = (z[:, 0] - z[:, 1]) * torch.where(y == 0, 1, -1) - 8 / 255 * (weight[0] - weight[1]).abs().sum()
    torch.testing.assert_close(losses(objective, model, x, y), F.softplus(-gap))


def test_early_epochs_have_their_own_steps() -> None:
    objective = Adversarial(steps=7, early_steps=2, early=0.5)
    assert [objective.at(epoch, 4).steps for epoch in range(4)] == [2, 2, 7, 7]
    assert Adversarial(steps=7).at(0, 4).steps == 7


def test_trades_without_divergence_is_standard(x: Tensor, y: Tensor) -> None:
    model = Plain()
    torch.testing.assert_close(losses(Trades(beta=0), model, x, y), losses(Standard(), model, x, y))


def test_trades_divergence(x: Tensor, y: Tensor) -> None:
    model, objective = Plain(), Trades(beta=6, eps=0.1)
    x_adv = objective.attack(model, x, chance())
    assert float((x_adv - x).abs().max()) <= 0.1 + 1e-6
    log_p, log_q = torch.log_softmax(model(x), dim=1), torch.log_softmax(model(x_adv), dim=1)
    between = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    torch.testing.assert_close(losses(objective, model, x, y), losses(Standard(), model, x, y) + 6 * between)
    random = x + 0.1 * (chance(3).uniform(*SHAPE) * 2 - 1)
    by_chance = (log_p.exp() * (log_p - torch.log_softmax(model(random), dim=1))).sum(dim=1)
    assert (between > by_chance).all()


def test_iaat_grows_keeps_and_shrinks() -> None:
    """One weight per class: a linear model whose distance to the boundary is known for every image."""
    class Threshold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            level = x.flatten(1).mean(dim=1) - 0.5
            return torch.stack((-level, level), dim=1)

    x = torch.stack([torch.full(SHAPE, value) for value in (0.60, 0.535, 0.51, 0.4)])
    y = torch.ones(4, dtype=torch.int64)
    objective = Iaat(eps=0.03, growth=0.01, average=0.1, steps=3)
    # Distances 0.10 and 0.035 at eps 0.03: bears 0.04, bears 0.03 only; 0.01 bears neither; the last is wrong.
    adapted = objective.at(7, 20)(Threshold(), x, y, chance(), objective.memory(4)).memory["eps"]
    torch.testing.assert_close(adapted, torch.tensor([0.031, 0.030, 0.029, 0.029]))
    warm = objective.at(4, 20)(Threshold(), x, y, chance(), objective.memory(4)).memory["eps"]
    torch.testing.assert_close(warm, torch.full((4,), 0.03))


def test_gaussian_is_cross_entropy_on_its_noises(x: Tensor, y: Tensor) -> None:
    model, delta = Plain(), noise.draw(x, 0.5, 3, chance())
    assert delta.shape == (B, 3, *SHAPE)
    expected = torch.stack([F.cross_entropy(model(x + delta[:, i]), y, reduction="none") for i in range(3)]).mean(dim=0)
    torch.testing.assert_close(losses(Gaussian(sigma=0.5, noises=3), model, x, y), expected)


def test_stability(x: Tensor, y: Tensor) -> None:
    model, delta = Plain(), noise.draw(x, 0.25, 1, chance())[:, 0]
    p, log_q = torch.softmax(model(x), dim=1), torch.log_softmax(model(x + delta), dim=1)
    expected = F.cross_entropy(model(x), y, reduction="none") - 2 * (p * log_q).sum(dim=1)
    torch.testing.assert_close(losses(Stability(sigma=0.25), model, x, y), expected)


def test_smoothadv_without_noise_is_pgd_training(x: Tensor, y: Tensor) -> None:
    model = Plain()
    smoothed = SmoothAdv(sigma=0, noises=1, eps=0.7, steps=4, warmup_epochs=0)
    plain = Adversarial(norm="l2", eps=0.7, steps=4, step_size=2 * 0.7 / 4, random_start=False)
    torch.testing.assert_close(losses(smoothed, model, x, y), losses(plain, model, x, y))
    assert (losses(plain, model, x, y) > losses(Standard(), model, x, y)).all()


def test_smoothadv_radius_grows() -> None:
    objective = SmoothAdv(eps=1.0, warmup_epochs=10)
    assert [objective.at(epoch, 30).eps for epoch in (0, 4, 9, 29)] == [0.1, 0.5, 1.0, 1.0]


def test_macer_radius_of_known_probabilities() -> None:
    """Logits log p / β give softmax(β z) = p for every noise: the gap is Φ⁻¹(p₁) − Φ⁻¹(p₂)."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.05, 0.05, 0.9]], dtype=torch.float64)
    objective = Macer(sigma=0.5, gamma=8, beta=16, noises=4)
    z = (p.log() / 16).unsqueeze(1).expand(3, 4, 3)
    gap = torch.special.ndtri(torch.tensor([0.7, 0.9], dtype=torch.float64)) - torch.special.ndtri(
        torch.tensor([0.2, 0.05], dtype=torch.float64))
    expected = torch.stack([0.25 * (8 - gap[0]), torch.tensor(0.0, dtype=torch.float64), 0.25 * (8 - gap[1])])
    torch.testing.assert_close(objective.hinge(z, torch.tensor([0, 0, 2])), expected)


def test_macer_leaves_out_what_is_certain_and_stays_finite() -> None:
    z = torch.tensor([[[50.0, 0, 0]], [[0.01, 0.0, 0.0]]], requires_grad=True)
    hinge = Macer(sigma=0.5).hinge(z, torch.tensor([0, 0]))
    assert hinge[0] == 0 and hinge[1] > 0
    gradient = torch.autograd.grad(hinge.sum(), z)[0]
    assert gradient.isfinite().all() and float(gradient[0].abs().max()) == 0 and gradient[1, 0, 0] < 0


def test_macer_is_deferred() -> None:
    assert [Macer(weight=16, defer=31).at(epoch, 90).weight for epoch in (0, 30, 31)] == [0, 0, 16]


def test_consistency_of_equal_answers_is_the_entropy(y: Tensor) -> None:
    """Without noise all answers are one: no spread, and η times its entropy."""
    model, x = Plain(), torch.rand(B, *SHAPE, generator=torch.Generator().manual_seed(2))
    p = torch.softmax(model(x), dim=1)
    expected = losses(Standard(), model, x, y) - 0.5 * (p * p.log()).sum(dim=1)
    torch.testing.assert_close(losses(Consistency(sigma=0, weight=5), model, x, y), expected)


def test_consistency_spread(x: Tensor, y: Tensor) -> None:
    model, delta = Plain(), noise.draw(x, 1.0, 2, chance())
    p = torch.softmax(noise.logits(model, x, delta), dim=2)
    average = p.mean(dim=1)
    spread = (average.unsqueeze(1) * (average.unsqueeze(1).log() - p.log())).sum(dim=2).mean(dim=1)
    expected = losses(Gaussian(sigma=1.0, noises=2), model, x, y) + 10 * spread
    torch.testing.assert_close(losses(Consistency(sigma=1.0, weight=10, eta=0), model, x, y), expected)


def test_smoothmix_without_mixtures_is_gaussian(x: Tensor, y: Tensor) -> None:
    model = Plain()
    mixed = losses(SmoothMix(sigma=0.5, noises=4, eta=0, warmup_epochs=0), model, x, y)
    assert torch.equal(mixed, losses(Gaussian(sigma=0.5, noises=4), model, x, y))


def test_smoothmix_by_hand(x: Tensor) -> None:
    """Both forms, put together from their formulas; images answered wrongly do not count in the code's."""
    model, m = Plain(), 3
    delta = noise.draw(x, 0.5, m, chance())
    average = torch.stack([torch.softmax(model(x + delta[:, i]), dim=1) for i in range(m)]).mean(dim=0)
    right = torch.tensor([True, False, True, False])
    y = (average.argmax(dim=1) + ~right) % K
    x_adv = x
    for _ in range(2):
        here = x_adv.clone().requires_grad_()
        p = torch.stack([torch.softmax(model(here + delta[:, i]), dim=1) for i in range(m)]).mean(dim=0)
        gradient = torch.autograd.grad(-p[torch.arange(B), y].log().sum(), here)[0]
        x_adv = (x_adv + 0.8 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)
    lam = chance().at("ratio").uniform(high=0.5)
    assert float(lam.min()) >= 0 and float(lam.max()) <= 0.5
    mixed, target = torch.lerp(x, x_adv, lam.view(-1, 1, 1, 1)), (1 - lam[:, None]) * average + lam[:, None] / K
    log_p = torch.stack([torch.log_softmax(model(mixed + delta[:, i]), dim=1) for i in range(m)])
    entropy = -(target * log_p).sum(dim=2).mean(dim=0)
    kl = entropy + (target * target.log()).sum(dim=1)
    plain = losses(Gaussian(sigma=0.5, noises=m), model, x, y)
    settings: dict[str, Any] = {"sigma": 0.5, "noises": m, "steps": 2, "step_size": 0.8, "eta": 3, "warmup_epochs": 0}
    torch.testing.assert_close(losses(SmoothMix(**settings), model, x, y), plain + 3 * right * kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses(SmoothMix(**settings, form="paper"), model, x, y), plain + 3 * entropy,
                               rtol=1e-4, atol=1e-5)


def test_smoothmix_target_carries_gradient_only_in_the_code_form(x: Tensor, y: Tensor) -> None:
    model = Plain()
    average = torch.softmax(torch.randn(B, K, generator=torch.Generator().manual_seed(0)), dim=1).requires_grad_()
    delta = noise.draw(x, 0.5, 2, chance())
    for form, carries in (("code", True), ("paper", False)):
        value = SmoothMix(form=form).mixture(model, x, x.flip(0), average, delta, chance()).sum()
        gradient = torch.autograd.grad(value, [average], allow_unused=True)[0]
        assert (gradient is not None and float(gradient.abs().sum()) > 0) == carries


def test_smoothmix_one_step_is_at_its_reach(x: Tensor, y: Tensor) -> None:
    """Over the first ten epochs the reach and the weight grow; the first iterate lies at the reach."""
    objective = SmoothMix(step_size=1.0, one_step=True, eta=5)
    early = objective.at(1, 90)
    assert early.reach == pytest.approx(0.2) and early.eta == pytest.approx(1.0)
    assert objective.at(50, 90).reach == 1.0 and objective.at(50, 90).eta == 5
    inner = torch.full_like(x, 0.5)
    seen: list[Tensor] = []

    class Watched(Plain):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach())
            return super().forward(x)

    quiet = dataclasses.replace(early, sigma=0.0, noises=1, steps=3)
    quiet(Watched(), inner, y, chance(), {})
    distance = (seen[-2] - inner).flatten(1).norm(dim=1)
    torch.testing.assert_close(distance, torch.full((B,), 0.2), rtol=1e-4, atol=1e-5)


def test_ascent_respects_radii_of_each_image(x: Tensor, y: Tensor) -> None:
    model, eps = Plain(), torch.tensor([0.0, 0.01, 0.05, 0.2])
    for norm in ("linf", "l2"):
        iterates = inner_pgd(lambda at: F.cross_entropy(model(at), y, reduction="none"), x, x, norm=norm, eps=eps,
                          step_size=eps / 2, steps=4)
        assert len(iterates) == 5 and not any(iterate.requires_grad for iterate in iterates)
        distance = torch.linalg.vector_norm((iterates[-1] - x).flatten(1), ord=math.inf if norm == "linf" else 2, dim=1)
        assert (distance <= eps + 1e-6).all() and float(distance[3]) > 0.1
    assert torch.equal(project_to_ball(x, x, "l2", 0.5), x)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="`steps` must be a whole number of at least 1"):
        Adversarial(steps=0)
    with pytest.raises(InputError, match="did you mean 'linf'"):
        Adversarial(norm="linfy")
    with pytest.raises(InputError, match="`sigma` must not be negative"):
        Gaussian(sigma=-1)
    with pytest.raises(InputError, match="`form` must be one of code, paper"):
        SmoothMix(form="codes")
    assert Adversarial(eps="8/255").eps == 8 / 255  # type: ignore[arg-type]
