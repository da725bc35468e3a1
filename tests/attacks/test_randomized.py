"""Randomised models: a noise defence in closed form, gradients averaged over passes, and repeated
verdicts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import NoiseDefence
from equipoise.attacks import (
    Apgd,
    Fab,
    Pgd,
    Square,
    Suite,
    TargetedApgd,
    make_attack,
    rand,
    run_sanity_checks,
)
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.randomized import average_passes, judge_repeatedly
from equipoise.core import rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat

THREAT = Threat("linf", 0.05)
X = 0.3 + 0.4 * torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
STREAM = rng.stream(0, "test", torch.arange(len(X)))


class NoisyGradients(nn.Module):
    """Exact logits ±w·x, but gradients under noise that hides them: no pass shows the way, their
    mean does."""

    def __init__(self, scale: float = 6.0) -> None:
        super().__init__()
        self.weight, self.scale = (
            nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(1))),
            scale,
        )

    def forward(self, x: Tensor) -> Tensor:
        noise = self.scale * torch.randn(16)
        flat = x.flatten(1) - 0.5
        z = flat @ self.weight + (flat - flat.detach()) @ noise
        return torch.stack([z, -z], dim=1)


def labels(model: NoiseDefence | NoisyGradients) -> Tensor:
    return (((X - 0.5).flatten(1) @ model.weight) < 0).long().detach()


@pytest.mark.parametrize(
    "attack", [Suite((Apgd("ce", 8),), eot=20, repeats=100), Pgd(steps=8, eot=8, repeats=100)]
)
def test_an_attack_reaches_the_worst_point_of_a_noise_defence(attack: Suite | Pgd) -> None:
    model = NoiseDefence()
    y = labels(model)
    x_adv = attack(model, X, y, threat=THREAT, stream=STREAM)
    reached, best = model.probability(x_adv, y), model.probability(X, y, THREAT.eps)
    assert (
        float((reached - best).mean()) < 0.02 < 0.1 < float((model.probability(X, y) - best).mean())
    )


def test_averaged_gradients_break_what_the_noise_of_one_pass_hides() -> None:
    model = NoisyGradients()
    y, threat = labels(model), Threat("linf", 0.03)
    worst = (X - 0.5).flatten(1) @ model.weight * (
        1 - 2 * y
    ) - threat.eps * model.weight.abs().sum()
    breakable = int((worst < 0).sum())

    def broken(attack: Apgd) -> int:
        with rng.seed_global(STREAM):
            x_adv = attack(model, X, y, threat=threat, stream=STREAM)
        return int((model(x_adv).argmax(dim=1) != y).sum())

    assert broken(Apgd(steps=5)) < 0.7 * breakable
    assert broken(Apgd(steps=5, eot=200)) >= 0.9 * breakable


@pytest.mark.parametrize(
    "attack", [Apgd(steps=3), TargetedApgd(3, (1,), "distance"), Fab(3, (1,)), Square(5)]
)
def test_every_attack_averages_its_passes(attack: Apgd) -> None:
    """`eot` times the passes with or without a gradient, beyond those of verdicts."""

    def passes(**settings: int) -> int:
        model = NoiseDefence(sigma=1e-9)
        y = labels(model)
        own = X[:4].clone(), y[:4]
        Suite((attack,), repeats=1, **settings)(  # type: ignore[arg-type]
            model, *own, threat=Threat("linf", 1e-4), stream=STREAM[:4]
        )
        return model.passes

    one, three, five = passes(eot=1), passes(eot=3), passes(eot=5)
    assert five - three == three - one > 0


def test_the_mean_of_passes() -> None:
    numbers = iter(range(100))
    mean = average_passes(lambda x: (x + next(numbers), x * 2), 5)
    first, second = mean(torch.tensor([1.0, 2.0]))
    assert first.tolist() == [3.0, 4.0] and second.tolist() == [2.0, 4.0]


def test_an_image_is_broken_only_if_no_pass_is_correct() -> None:
    y = torch.tensor([0, 0, 0])
    passes = iter([[0, 1, 1], [1, 1, 2], [1, 0, 1], [1, 0, 1]] * 2)

    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(torch.tensor(next(passes, [0] * len(x))), 3).float()

    verdict = judge_repeatedly(lambda: Scripted()(X[:3]), y, 4)
    assert verdict.share_correct.tolist() == [0.25, 0.5, 0.0]
    assert verdict.predicted.tolist()[::2] == [1, 1]
    margin = float(
        torch.tensor([1.0, 0, 0]).softmax(0)[0] - torch.tensor([1.0, 0, 0]).softmax(0)[1]
    )
    torch.testing.assert_close(verdict.margin, torch.tensor([-0.5 * margin, 0.0, -margin]))
    source = GradientSource(NoiseDefence(), GradientSettings(repeats=4), "fp32", X)
    source.model = Scripted()
    judged = source.judge(X[:3], y)
    assert (judged.predicted != y).tolist() == [False, False, True]


def test_attacks_on_randomised_models_repeat_and_leave_the_global_generators_alone() -> None:
    model, attack = NoiseDefence(), rand(steps=3, eot=2, repeats=3)
    y = labels(model)

    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002

    before = states()
    first = attack(model, X, y, threat=THREAT, stream=STREAM)
    assert states() == before
    torch.rand(3)
    assert torch.equal(attack(model, X, y, threat=THREAT, stream=STREAM), first)
    assert not torch.equal(attack(model, X, y, threat=THREAT, stream=STREAM.at("other")), first)


def test_settings_of_rand_and_of_other_attacks() -> None:
    attack = make_attack("rand", steps=7, eot=5)
    assert isinstance(attack, Suite) and (attack.eot, attack.repeats) == (5, 50)
    assert [stage.name for stage in attack.stages()] == ["apgd-ce@7", "apgd-dlr@7"]
    assert {(stage.gradients.eot, stage.gradients.repeats) for stage in attack.stages()} == {
        (5, 50)
    }
    assert (
        make_attack("rand").eot,
        make_attack("fast", eot=3).repeats,
        make_attack("pgd").repeats,
    ) == (20, 50, None)
    assert {stage.gradients.eot for stage in make_attack("fast", eot=3, repeats=2).stages()} == {3}
    assert (
        "eot" not in make_attack("standard").describe()
        and make_attack("rand").describe()["repeats"] == 50
    )
    for name, value in (("eot", 0), ("repeats", 0), ("repeats", 10**9)):
        with pytest.raises(InputError, match=f"`{name}` must be"):
            make_attack("rand", **{name: value})
    with pytest.raises(InputError, match="`eot` must be"):
        Apgd(eot=0).stages()


def test_a_sanity_check_names_the_attack_for_randomised_models() -> None:
    model = NoiseDefence()
    y = labels(model)

    def alarms(eot: int | None = None, repeats: int | None = None) -> dict[str, str]:
        checks = run_sanity_checks(
            model, X, y, threat=THREAT, stream=STREAM, eot=eot, repeats=repeats
        )
        return {check.name: check.advice or "" for check in checks if check.alarm}

    assert "Run --attack rand" in alarms()["randomness"] and "batch-size dependence" not in alarms()
    assert "randomness" not in alarms(eot=2, repeats=5)
    model.sigma = 0.0
    assert "randomness" not in alarms()
