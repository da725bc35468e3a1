"""The rules of one pair of models, the attacks on them, and attacks at fixed target strengths."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_pair import conditions, study_run, untrained_pair
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import FunctionAttack, cached
from equipoise.core import rng
from equipoise.core.rng import Stream
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import pixels
from equipoise.local_smoothing.policy import TARGETS
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.local_rules import (
    Bfloat16Copy,
    RuleSet,
    alpha_of,
    correct_at_targets,
    gamma_for_weight,
    gradient_norms,
    measure_target_strengths,
    with_fallback,
)

THREAT = Threat("linf", 0.5)


class Brightness(nn.Module):
    """Class 1 above a mean of one half."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(dim=1)
        return torch.stack((0.5 - mean, mean - 0.5), dim=1)


class Brighten:
    """An attack that adds a number, and counts the images of every call."""

    def __init__(self, amount: float) -> None:
        self.amount, self.calls = amount, list[int]()
        self.attack = FunctionAttack(name="brighten", function=self.run)

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **_: object
    ) -> Tensor:
        self.calls.append(len(x))
        return x + self.amount + 1e-3 * stream.uniform(*x.shape[1:])


def dark_images() -> tuple[Tensor, Tensor, Stream]:
    x = torch.tensor([0.1, 0.2, 0.45, 0.3]).view(4, 1, 1, 1).expand(4, 1, 2, 2).contiguous()
    return (
        x,
        torch.zeros(4, dtype=torch.long),
        rng.stream(0, "some attack", torch.tensor([5, 6, 7, 8])),
    )


def rule_set() -> RuleSet:
    return RuleSet(untrained_pair(), conditions(), steps=2)


def test_the_second_attack_runs_on_surviving_images_only() -> None:
    x, y, stream = dark_images()
    second = Brighten(0.4)
    x_adv = with_fallback(Brighten(0.1).attack, second.attack, {})(
        Brightness(), x, y, threat=THREAT, stream=stream
    )
    assert second.calls == [3], "the third image is broken by the first attack"
    assert (x_adv - x)[2].max() < 0.2 and (x_adv - x)[[0, 1, 3]].min() >= 0.4


def test_the_random_numbers_of_an_image_do_not_depend_on_the_other_images() -> None:
    x, y, stream = dark_images()
    whole, alone = (
        with_fallback(Brighten(0.1).attack, Brighten(0.4).attack, {})(
            Brightness(), x[rows], y[rows], threat=THREAT, stream=stream[rows]
        )
        for rows in (slice(0, 4), slice(3, 4))
    )
    assert torch.equal(alone, whole[3:])


def test_no_second_attack_if_no_image_survives() -> None:
    x, y, stream = dark_images()
    second = Brighten(0.4)
    with_fallback(Brighten(0.45).attack, second.attack, {})(
        Brightness(), x, y, threat=THREAT, stream=stream
    )
    assert second.calls == []


def test_cached_images_are_computed_once_with_their_own_random_stream() -> None:
    x, y, stream = dark_images()
    counted = Brighten(0.1)
    attack = cached(counted.attack, 3, {})
    first = attack(Brightness(), x, y, threat=THREAT, stream=stream)
    again = attack(Brightness(), x, y, threat=THREAT, stream=stream.at("another attack"))
    fresh = cached(Brighten(0.1).attack, 3, {})(
        Brightness(), x, y, threat=THREAT, stream=stream.at("another attack")
    )
    assert torch.equal(first, again) and torch.equal(first, fresh) and counted.calls == [4]
    attack(Brightness(), x[:2], y[:2], threat=THREAT, stream=stream[:2])
    assert counted.calls == [4, 2]


def test_attacks_are_described_by_their_settings() -> None:
    rules = rule_set()
    weak, strong = (
        rules.attacks_through(rules.pair.robust, gamma, "ratio") for gamma in (1.0, 2.0)
    )
    for name in ("pgd", "pgd-soft"):
        assert weak[name].describe() != strong[name].describe()
    assert rules.on_accurate.describe() != rules.on_robust.describe()
    assert rules.on_accurate.describe() == rule_set().on_accurate.describe()


def test_every_rule_is_evaluated_on_the_same_transferred_images() -> None:
    images = []
    for gamma in (0.1, 10.0):  # two rules, which misclassify different images
        rules = rule_set()
        x, y = rules.first_images(rules.pair.test), rules.pair.test.labels
        rule = rules.rule(rules.pair.robust, gamma, "constant")
        images.append(
            rules.on_accurate(
                rule, x, y, threat=Threat("linf", 0.1), stream=rng.stream(0, "any", torch.arange(6))
            )
        )
        assert bool((images[-1] != x).flatten(1).any(dim=1).all()), (
            "every image is attacked, misclassified or not"
        )
    assert torch.equal(images[0], images[1])


@pytest.mark.parametrize(
    ("gamma", "trust", "names"),
    [(1.0, "constant", {"pgd"}), (1.0, "ratio", {"pgd", "pgd-soft"}), (math.inf, "ratio", {"pgd"})],
)
def test_softened_attacks_where_the_trust_term_depends_on_gradients(
    gamma: float, trust: str, names: set[str]
) -> None:
    rules = rule_set()
    assert rules.attacks_through(rules.pair.robust, gamma, trust).keys() == names


def test_the_scale_is_the_median_of_the_trust_term_on_held_out_images() -> None:
    rules = rule_set()
    assert rules.trust_scale("constant", "logits") == 1.0
    rule = SmoothedClassifier(rules.pair.accurate, rules.pair.robust, 1.0, trust="top-gradient")
    expected = rule.sides_and_trust(rules.first_images(rules.pair.held_out))[2].detach().median()
    assert rules.trust_scale("top-gradient", "logits") == pytest.approx(expected.item())


@pytest.mark.parametrize(
    "model",
    [
        models.build("resnet8", num_classes=10, image_shape=(1, 8, 8), seed=1),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ],
    ids=["resnet8", "linear"],
)
def test_a_bfloat16_copy_has_no_batch_norm_and_leaves_the_model_unchanged(model: nn.Module) -> None:
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = model.eval()(x)
    copy = Bfloat16Copy(model, x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in copy.modules())
    # Weights in bfloat16, passes in float32: some CPUs trap on bfloat16 passes.
    torch.testing.assert_close(
        copy.model.float()(x), before, rtol=0, atol=0.05 * float(before.detach().abs().max())
    )
    assert torch.equal(model(x), before) and all(
        p.dtype == torch.float32 for p in model.parameters()
    )


def test_success_is_decided_in_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, allowed = untrained_pair(), list[bool]()

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            allowed.append(torch.backends.cudnn.allow_tf32)
            return torch.zeros(len(x), 10)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    run = study_run(tmp_path, "local-smoothing")
    rule = SmoothedClassifier(pair.accurate, pair.robust, 1.0)
    measure_target_strengths(run, rule, {"watched": Watched()}, pair.test, conditions(), 1)
    assert len(run.finish()) == len(TARGETS) * len(pair.test) and allowed and not any(allowed)


def test_correct_images_by_target_and_image() -> None:
    rows = [
        AttackRow(
            index=index,
            model=model,
            attack="aimed",
            alpha=alpha_of(gamma),
            label=0,
            correct=model == "robust" and gamma == math.inf and index == 7,
        )
        for index in (9, 7)
        for model in ("accurate", "robust")
        for gamma in TARGETS
    ]
    correct = correct_at_targets(rows, "robust")
    assert correct.shape == (len(TARGETS), 2) and correct.nonzero().tolist() == [
        [len(TARGETS) - 1, 0]
    ]
    assert not correct_at_targets(rows, "accurate").any()


def test_gradient_norms_of_both_models_at_clean_and_attacked_images() -> None:
    pair = untrained_pair()
    labels = pair.accurate(pixels(pair.test.images)).argmax(
        dim=1
    )  # PGD leaves misclassified images unchanged
    norms = gradient_norms(
        replace(pair, test=replace(pair.test, labels=labels)), conditions(batch_size=4), steps=1
    )
    assert all(
        norms.norms(images, model).shape == (6, 10)
        for images in norms.INPUTS
        for model in norms.MODELS
    )
    assert (norms.clean_of_accurate != norms.clean_of_robust).any()
    assert (norms.clean_of_accurate != norms.attacked_accurate_of_accurate).any()


@pytest.mark.parametrize("scale", [0.0731, 1.0, 41.9])
def test_gamma_is_the_same_where_the_scale_rounds_differently(scale: float) -> None:
    gammas = {gamma_for_weight(0.98, scale * (1 + error)) for error in (-1e-6, 0.0, 1e-6)}
    assert len(gammas) == 1 and gammas.pop() == pytest.approx(49 / scale, rel=5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gradients_of_bfloat16_copies_have_the_same_direction() -> None:
    pair, x = (
        untrained_pair(),
        torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).cuda(),
    )
    bases = [pair.accurate.cuda(), pair.robust.cuda()]
    gradients = []
    for g, h in (bases, [Bfloat16Copy(base, x) for base in bases]):
        rule = SmoothedClassifier(
            g.eval(), h.eval(), 1.0, trust="ratio", space="probabilities"
        ).cuda()
        point = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(rule(point)[:, 0].sum(), point)[0].flatten(1))
    assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1]).min() > 0.9
