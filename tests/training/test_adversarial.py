"""Standard and adversarial objectives where their values are known."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_objectives import LABELS, SHAPE, B, K, NormNetwork, PlainNetwork, images, losses, stream
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.core.ascent import value_and_gradient
from equipoise.core.checks import InputError
from equipoise.core.geometry import project_to_ball
from equipoise.training.objectives import IAAT, TRADES, Adversarial, Standard
from equipoise.training.objectives.adversarial import inner_pgd


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_standard_is_the_cross_entropy(smoothing: float) -> None:
    model, x = PlainNetwork(), images()
    log_p = torch.log_softmax(model(x), dim=1)
    expected = -(1 - smoothing) * log_p[torch.arange(B), LABELS] - smoothing * log_p.mean(dim=1)
    torch.testing.assert_close(
        losses(Standard(label_smoothing=smoothing), model, x, LABELS), expected
    )


def test_adversarial_loss_of_a_linear_model() -> None:
    """Two classes, ℓ∞: the margin falls by exactly eps·‖w‖₁ where no pixel leaves [0, 1]."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(105, 2, dtype=torch.float64))
    weight = next(iter(model.parameters())).detach()
    x, y = torch.full((B, *SHAPE), 0.5, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    z = model(x)
    margin = (z[:, 0] - z[:, 1]) * torch.where(y == 0, 1, -1) - 8 / 255 * (
        weight[0] - weight[1]
    ).abs().sum()
    torch.testing.assert_close(
        losses(Adversarial(eps=8 / 255, steps=5), model, x, y), F.softplus(-margin)
    )


def test_early_epochs_have_their_own_steps() -> None:
    objective = Adversarial(steps=7, early_steps=2, early_share=0.5)
    assert [objective.at_epoch(epoch, 4).steps for epoch in range(4)] == [2, 2, 7, 7]
    assert Adversarial(steps=7).at_epoch(0, 4).steps == 7


def test_training_for_mixing_adds_the_confidence_of_kept_and_of_wrong_images() -> None:
    """The term by its formula on probabilities, for all four kinds of images."""
    objective = Adversarial(for_mixing=True, mixing_weight=0.7, mixing_confidence=0.6)
    clean = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [2.0, 0.5, 0.0], [0.2, 0.1, 0.0]])
    attacked = torch.tensor([[1.0, 0.0, 0.5], [0.3, 0.1, 0.0], [0.0, 1.0, 0.2], [0.0, 0.4, 0.1]])
    y, odds = (
        torch.tensor([0, 0, 0, 1]),
        0.6 / 0.4,
    )  # kept; wrong clean only; lost under attack; wrong clean, kept
    expected = []
    for z, z_adv, label in zip(clean, attacked, y, strict=True):
        p, q = torch.softmax(z, 0), torch.softmax(z_adv, 0)
        kept = (
            torch.log(1 + odds * (1 - q.max()) / q.max())
            if q.argmax() == label
            else torch.tensor(0.0)
        )
        wrong = (
            torch.log(1 + p.max() / (1 - p.max()) / odds)
            if p.argmax() != label
            else torch.tensor(0.0)
        )
        expected.append(kept + wrong)
    term = objective.confidence_loss(clean, attacked, y)
    torch.testing.assert_close(term, torch.stack(expected))
    assert float(term[2]) == 0 and (term[[0, 1, 3]] > 0).all()
    model, x = PlainNetwork(), images()
    plain, mixed = (
        losses(own, model, x, LABELS)
        for own in (Adversarial(eps=0.1), Adversarial(eps=0.1, for_mixing=True, mixing_weight=0.7))
    )
    assert (mixed >= plain).all() and (mixed > plain).any()
    unweighted = losses(Adversarial(eps=0.1, for_mixing=True, mixing_weight=0.0), model, x, LABELS)
    torch.testing.assert_close(unweighted, plain)


def test_clean_and_attacked_images_share_the_statistics_of_batch_norm() -> None:
    """The network that is trained is then, up to the average over batches, the one that is attacked
    and used."""
    torch.manual_seed(0)
    model, x = NormNetwork().train(), images()
    same = copy.deepcopy(model)
    batches: list[Tensor] = []
    model.register_forward_pre_hook(
        lambda module, args: batches.append(args[0]) if module.training else None
    )
    losses(Adversarial(eps=0.1, steps=1, for_mixing=True), model, x, LABELS).sum().backward()
    (batch,) = batches
    gradients = [parameter.grad for parameter in model.parameters()]
    assert batch.shape == (2 * B, *SHAPE) and torch.equal(batch[:B], x)
    assert 0 < float((batch[B:] - x).abs().max()) <= 0.1 + 1e-6
    clean, attacked = same(batch).chunk(2)
    for name, value in same.named_buffers():
        assert torch.equal(value, dict(model.named_buffers())[name]), name
    term = Adversarial(for_mixing=True).confidence_loss(clean, attacked, LABELS)
    total = (F.cross_entropy(attacked, LABELS, reduction="none") + term).sum()
    expected = torch.autograd.grad(total, list(same.parameters()))
    assert bool((clean.argmax(dim=1) != LABELS).any())
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value)


@pytest.mark.parametrize("seed", [0, 1])
def test_training_for_mixing_keeps_the_network_of_evaluation_mode(seed: int) -> None:
    """With a clean pass in evaluation mode the two modes drift apart, and this accuracy falls to
    about 30 %."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    patterns = torch.rand(4, 3, 8, 8, generator=generator) - 0.5
    stages = [
        stage
        for channels in (3, 8, 8, 8)
        for stage in (
            nn.Conv2d(channels, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
    ]
    model = nn.Sequential(*stages, nn.Flatten(), nn.Linear(512, 4))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 4, (count,), generator=generator)
        noise = torch.randn(count, 3, 8, 8, generator=generator)
        return (0.5 + 0.14 * patterns[y] + 0.2 * noise).clamp(0, 1), y

    for objective, steps, lr in (
        (Adversarial(eps=2 / 255, steps=2), 40, 0.05),
        (Adversarial(eps=2 / 255, steps=2, for_mixing=True), 30, 0.1),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for step in range(steps):
            noise_stream = rng.stream(seed, "train", torch.arange(64)).at("step", step)
            objective(model.train(), *draw(64), noise_stream, {}).losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x, y = draw(500)
    with torch.no_grad():
        evaluated = float((model.eval()(x).argmax(dim=1) == y).float().mean())
        trained = float((model.train()(x).argmax(dim=1) == y).float().mean())
    assert evaluated > 0.6 and abs(evaluated - trained) < 0.1


def test_only_runs_for_mixing_have_another_version() -> None:
    """Plain runs can be resumed as before; runs for mixing that saw clean images in evaluation mode
    cannot."""
    assert [Adversarial(for_mixing=own).describe()["version"] for own in (False, True)] == [1, 2]


def test_at_a_confidence_of_one_half_kept_images_count_twice() -> None:
    attacked = 3 * torch.randn(50, K, generator=torch.Generator().manual_seed(0))
    y = attacked.argmax(dim=1)
    term = Adversarial(for_mixing=True).confidence_loss(attacked, attacked, y)
    torch.testing.assert_close(term, F.cross_entropy(attacked, y, reduction="none"))


def test_settings_of_training_for_mixing_are_refused_without_it() -> None:
    mistakes: list[dict[str, Any]] = [{"mixing_weight": 0.7}, {"mixing_confidence": 0.6}]
    for settings in mistakes:
        with pytest.raises(
            InputError,
            match=f"`{next(iter(settings))}` must be left out unless `for_mixing` is set",
        ):
            Adversarial(**settings)


def test_training_for_mixing_separates_confidences() -> None:
    """A model whose class is fixed, and whose confidence is free, learns to be sure of what it
    keeps only."""
    x = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    first = x.flatten(1).mean(dim=1) > 0.5
    y = torch.where(first, 0, 1)  # class 0 is predicted always: correct for bright images

    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            sure = F.softplus(self.fc(50 * (x.flatten(1).mean(dim=1, keepdim=True) - 0.5)))
            return torch.cat([sure, torch.zeros_like(sure), torch.zeros_like(sure)], dim=1)

    model = Sure()
    objective = Adversarial(for_mixing=True, mixing_confidence=0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        logits = model(x)
        optimizer.zero_grad()
        objective.confidence_loss(logits, logits, y).mean().backward()
        optimizer.step()
    sure = torch.softmax(model(x).detach(), 1).amax(dim=1)
    assert float(sure[first].mean()) > 0.6 > float(sure[~first].mean())
    with pytest.raises(InputError, match="`mixing_confidence` must"):
        Adversarial(mixing_confidence=1.0)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_inner_pgd_respects_the_radius_of_each_image(norm: str) -> None:
    model, x, eps = PlainNetwork(), images(), torch.tensor([0.0, 0.01, 0.05, 0.2])
    evaluate = value_and_gradient(
        lambda point: F.cross_entropy(model(point), LABELS, reduction="none")
    )
    iterates = inner_pgd(evaluate, x, x, norm=norm, eps=eps, step_size=eps / 2, steps=4)
    assert len(iterates) == 5 and not any(iterate.requires_grad for iterate in iterates)
    distance = torch.linalg.vector_norm(
        (iterates[-1] - x).flatten(1), ord=math.inf if norm == "linf" else 2, dim=1
    )
    assert (distance <= eps + 1e-6).all() and float(distance[3]) > 0.1


def test_projection_keeps_images_inside_the_ball() -> None:
    assert torch.equal(project_to_ball(images(), images(), "l2", 0.5), images())


def test_trades_without_divergence_is_standard() -> None:
    model, x = PlainNetwork(), images()
    torch.testing.assert_close(
        losses(TRADES(beta=0), model, x, LABELS), losses(Standard(), model, x, LABELS)
    )


def test_trades_adds_the_divergence_at_the_attacked_image() -> None:
    model, x, objective = PlainNetwork(), images(), TRADES(beta=6, eps=0.1)
    x_adv = objective.attack(model, x, stream())
    assert float((x_adv - x).abs().max()) <= 0.1 + 1e-6
    log_p, log_q = torch.log_softmax(model(x), dim=1), torch.log_softmax(model(x_adv), dim=1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    expected = losses(Standard(), model, x, LABELS) + 6 * divergence
    torch.testing.assert_close(losses(objective, model, x, LABELS), expected)
    random = x + 0.1 * (stream(3).uniform(*SHAPE) * 2 - 1)
    random_divergence = (log_p.exp() * (log_p - torch.log_softmax(model(random), dim=1))).sum(dim=1)
    assert (divergence > random_divergence).all()


class Threshold(nn.Module):
    """A linear model whose distance to the boundary is known: |mean − 0.5|."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.flatten(1).mean(dim=1) - 0.5
        return torch.stack((-level, level), dim=1)


@pytest.mark.parametrize(
    ("epoch", "radii"),
    [(7, [0.031, 0.030, 0.029, 0.029]), (4, [0.03] * 4)],
    ids=["adaptive", "warm-up"],
)
def test_iaat_grows_keeps_and_shrinks_radii(epoch: int, radii: list[float]) -> None:
    """At eps 0.03, distances 0.10 and 0.035 resist 0.04 and 0.03 only; 0.01 resists neither; the
    last is wrong."""
    x = torch.stack([torch.full(SHAPE, value) for value in (0.60, 0.535, 0.51, 0.4)])
    y = torch.ones(4, dtype=torch.int64)
    objective = IAAT(eps=0.03, growth=0.01, growth_weight=0.1, steps=3)
    output = objective.at_epoch(epoch, 20)(Threshold(), x, y, stream(), objective.initial_memory(4))
    torch.testing.assert_close(output.memory["eps"], torch.tensor(radii))
