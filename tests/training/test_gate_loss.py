"""The objective of the gate: its formula, its attacks, and that it learns to detect attacked
images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import losses, rng
from equipoise.core.checks import InputError
from equipoise.core.modes import inference
from equipoise.data.dataset import Dataset, whole_split
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, new_gate
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.mixing.surrogates import Sides, hinge_sums
from equipoise.models import build, checkpoint
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objectives.gate import GateLoss
from equipoise.training.recorder import LAST

B, C, H, W, K = 48, 1, 8, 8, 5


def gated_model(**settings: float) -> GatedClassifier:
    g, h = (
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval()
        for seed in (1, 2)
    )
    return GatedClassifier(
        g,
        h,
        new_gate(g, h, torch.rand(2, C, H, W), width=4, momentum=0.3),
        **settings,  # type: ignore[arg-type]
    )


def images_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(B, C, H, W, generator=generator), torch.randint(
        0, K, (B,), generator=generator
    )


def stream(count: int = B) -> rng.Stream:
    return rng.stream(0, "test", torch.arange(count))


@pytest.mark.parametrize("adversary", ["A", "B", "C"])
def test_the_loss_is_its_formula_whatever_the_range(adversary: str) -> None:
    model, (x, y) = gated_model(alpha_min=0.9, alpha_max=0.95).train(), images_and_labels()
    objective = GateLoss(
        adversary=adversary, eps=0.1, steps=3, c_ce=0.3, c_bce=0.7, c_prod=0.2, clean_weight=2.0
    )
    x_adv = objective.attack(model, x, y, stream())
    output = objective(model, x, y, stream(), {})
    g, h, z = model.log_probabilities_and_gate(torch.cat((x, x_adv)))
    alpha = torch.sigmoid(z)  # all of (0, 1), not the range
    assert float(alpha.detach().min()) < 0.9
    p = (1 - alpha)[:, None] * g.exp() + alpha[:, None] * h.exp()
    ce = -torch.log(p[torch.arange(2 * B), torch.cat((y, y))])
    bce = F.binary_cross_entropy(alpha, torch.arange(2 * B).ge(B).float(), reduction="none")
    clean, attacked = (0.3 * ce + 0.7 * bce + 0.2 * ce * bce).chunk(2)
    torch.testing.assert_close(output.losses, (2 * clean + attacked) / 3, rtol=1e-3, atol=1e-4)
    assert model.network.training and output.losses.requires_grad


@pytest.mark.parametrize("adversary", ["A", "B", "C"])
def test_every_image_is_attacked_at_its_own_radius(adversary: str) -> None:
    model, (x, y) = gated_model().train(), images_and_labels()
    x = 0.3 + 0.4 * x  # away from the ends of [0, 1]
    objective = GateLoss(adversary=adversary, eps=0.1, steps=6, min_radius=0.5, max_radius=1.5)
    distance = (objective.attack(model, x, y, stream()) - x).abs().flatten(1).amax(dim=1)
    radius = 0.1 * stream().at("radius").uniform(low=0.5, high=1.5)
    assert bool((distance <= radius + 1e-6).all()) and float(distance.max() / distance.min()) > 1.5
    assert (
        torch.isclose(distance, radius, atol=1e-5).float().mean() > 0.9
    )  # they reach the boundary


def test_the_attacks_raise_the_cross_entropy() -> None:
    model, (x, _) = gated_model().eval(), images_and_labels()
    y = model(x).argmax(dim=1)
    reached = {}
    for adversary in ("A", "B", "C"):
        objective = GateLoss(
            adversary=adversary,
            eps=0.1,
            steps=8,
            alpha_penalty=0.0,
            untargeted_share=1.0,
            min_radius=1.0,
            max_radius=1.0,
        )
        reached[adversary] = losses.cross_entropy(
            model(objective.attack(model, x, y, stream())), y
        ).mean()
    assert all(value > losses.cross_entropy(model(x), y).mean() for value in reached.values())
    assert min(reached["B"], reached["C"]) > 0.98 * reached["A"]


def test_the_penalty_lowers_alpha() -> None:
    model, (x, y) = gated_model().eval(), images_and_labels()
    objectives = [
        GateLoss(adversary="C", eps=0.1, steps=8, alpha_penalty=penalty) for penalty in (0.0, 1.0)
    ]
    alpha = [
        model.alphas(objective.attack(model, x, y, stream())).mean() for objective in objectives
    ]
    assert alpha[1] < alpha[0] - 0.05


def test_hinges_leave_more_decisions_to_a_wrong_accurate_side() -> None:
    """Over a switch, runs on the two hinges bring g to the target and h below its own threshold
    more often."""
    model, (x, _) = gated_model(), images_and_labels()
    switch = MixedClassifier(
        model.accurate, model.robust, 0.7, hard=True, logit_map=confidence_switch(1.0, 0.1)
    )
    mixed = model.with_settings_of(switch).with_range(0.55, 1.0).eval()
    y = mixed(x).argmax(dim=1)
    broken = {}
    for share in (0.0, 1.0):
        objective = GateLoss(
            eps=0.1,
            steps=12,
            alpha_penalty=0.0,
            untargeted_share=0.0,
            hinge_share=share,
            min_radius=1.0,
            max_radius=1.0,
        )
        attacked = objective.attack(mixed, x, y, stream())
        broken[share] = float((mixed(attacked).argmax(dim=1) != y).float().mean())
    assert broken[1.0] > broken[0.0] > 0


def test_hinge_objective_is_that_of_the_evaluation() -> None:
    model, (x, y) = gated_model(), images_and_labels()
    switch = MixedClassifier(
        model.accurate, model.robust, 0.7, hard=True, logit_map=confidence_switch(1.0, 0.1)
    )
    mixed = model.with_settings_of(switch).with_range(0.55, 1.0).eval()
    target, zero = (y + 1) % K, torch.zeros(B)
    sums = hinge_sums(Sides(mixed)(x), y, "mapped", reserve=0.05, rivals=0.0)
    expected = -sums.gather(1, target.unsqueeze(1)).squeeze(1)
    by_hinges = torch.arange(B) % 2 == 0
    value = GateLoss(hinge_share=0.5).attack_loss(mixed, x, y, zero, target, by_hinges)
    torch.testing.assert_close(value[by_hinges], expected[by_hinges])
    plain = GateLoss().attack_loss(mixed, x, y, zero, target)
    assert torch.equal(value[~by_hinges], plain[~by_hinges]) and not torch.equal(value, plain)
    assert [GateLoss(hinge_share=share).describe()["version"] for share in (0.0, 0.5)] == [1, 2]


def test_targets_are_drawn_among_the_other_classes() -> None:
    x, y = torch.rand(2000, C, H, W), torch.zeros(2000, dtype=torch.int64)
    targets = GateLoss(untargeted_share=0.25).draw_targets(gated_model().eval(), x, y, stream(2000))
    assert float((targets < 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert bool((targets != y).all()) and len(targets.unique()) == K


def test_the_number_of_steps_is_chi_squared() -> None:
    objective = GateLoss(steps=15)
    counts = torch.tensor(
        [objective.draw_steps(rng.stream(n, "steps", torch.arange(2))) for n in range(400)]
    ).float()
    assert float(counts.mean()) == pytest.approx(15, abs=0.8) and float(
        counts.std()
    ) == pytest.approx(30**0.5, abs=0.8)


def test_gradients_are_finite_with_a_logit_map_and_hard_decisions() -> None:
    model, (x, y) = gated_model(), images_and_labels()
    mapped = MixedClassifier(
        model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.2, 0.2), hard=True
    )
    hard = model.with_settings_of(mapped).train()
    output = GateLoss(c_ce=1.0, eps=0.1, steps=3)(hard, x, y, stream(), {})
    output.losses.mean().backward()
    gradients = [p.grad for p in hard.network.parameters()]
    assert bool(output.losses.isfinite().all())
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def uniform_images() -> tuple[Tensor, Tensor]:
    """Images of one grey each, on which attacks are easy to see."""
    x, y = images_and_labels()
    return x[:, :, :1, :1].expand(-1, -1, H, W), y


def dataset() -> Dataset:
    x, y = uniform_images()
    return whole_split("noise", "train", (x * 255).to(torch.uint8), y, tuple("abcde"))


def test_it_learns_to_detect_attacks_and_does_not_change_the_base_classifiers() -> None:
    model = gated_model()
    before = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if not key.startswith("network.")
    }
    objective = GateLoss(adversary="A", eps=0.2, steps=3, min_radius=1.0, max_radius=1.0)
    plan = TrainingPlan(
        epochs=12,
        batch_size=16,
        optimizer="adamw",
        lr=5e-3,
        held_out=0,
        ema=0.8,
        clip=10.0,
        warmup=0.5,
    )
    fit_model(model, objective, dataset(), plan)
    x, y = uniform_images()
    with inference(model):
        x_adv = objective.attack(model, x, y, stream())
        clean, attacked = (
            model.log_probabilities_and_gate(x)[2],
            model.log_probabilities_and_gate(x_adv)[2],
        )
    assert float(attacked.mean() - clean.mean()) > 1.5
    assert all(
        torch.equal(value, before[key])
        for key, value in model.state_dict().items()
        if key in before
    )


PLAN = TrainingPlan(
    epochs=2, batch_size=16, optimizer="adamw", lr=5e-3, held_out=0, ema=0.8, save_seconds=0
)


def test_checkpoints_of_a_mixture_need_no_metadata(tmp_path: Path) -> None:
    objective = GateLoss(eps=0.1, steps=2)
    expected = fit_model(gated_model(), objective, dataset(), PLAN).state_dict()
    model = fit_model(gated_model(), objective, dataset(), PLAN, out=tmp_path / "run")
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    metadata = checkpoint.read_safetensors(tmp_path / "run" / LAST)[1]
    assert (
        metadata.items()
        >= {"arch": "GatedClassifier", "num_classes": "5", "image_shape": "1,8,8"}.items()
    )


def test_gates_of_different_layers_are_different_runs(tmp_path: Path) -> None:
    first, second = gated_model(), gated_model()
    second.network.feature_layers = (
        ("conv1", "conv3"),
        ("conv1", "conv3"),
    )  # with the same initial weights
    fit_model(first, GateLoss(eps=0.1, steps=2), dataset(), PLAN, out=tmp_path / "run")
    with pytest.raises(InputError, match="feature_layers"):
        fit_model(second, GateLoss(eps=0.1, steps=2), dataset(), PLAN, out=tmp_path / "run")


def test_unknown_adversaries_are_refused() -> None:
    with pytest.raises(InputError, match="`adversary` must be one of A, B, C, got 'D'"):
        GateLoss(adversary="D")


def test_radii_must_be_ordered() -> None:
    with pytest.raises(InputError, match=r"`min_radius` must be at most max_radius, 1, got 2"):
        GateLoss(min_radius=2.0, max_radius=1.0)


def test_models_without_a_gate_are_refused() -> None:
    with pytest.raises(InputError, match="`model` must be a GatedClassifier, got CNN"):
        GateLoss()(gated_model().accurate, *images_and_labels(), stream(), {})
