"""Every check raises its alarm where it should, and only there."""

from __future__ import annotations

import math

import pytest
import torch
from attack_models import HardDecision
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise.attacks import black_box_check, run_sanity_checks
from equipoise.core.results import SanityCheck
from equipoise.core.rng import stream
from equipoise.core.threat import Threat


class Faulty(nn.Module):
    """A model with the fault of that name."""

    def __init__(self, base: nn.Module, fault: str) -> None:
        super().__init__()
        self.base, self.fault, self.calls = base, fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z: Tensor = self.base(x)
        match self.fault:
            case "randomness":
                return z + torch.sin(torch.tensor(float(self.calls)))
            case "batch-size dependence":
                return z + len(x)
            case "probabilities for logits":
                return torch.softmax(z, dim=1)
            case "vanishing gradients":
                return z.round()
        return z


def _run(model: nn.Module, linear: Linear) -> dict[str, SanityCheck]:
    x = stream(3, "x", torch.arange(12)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    results = run_sanity_checks(
        model, x, y, threat=Threat("linf", 0.02), stream=stream(0, "s", torch.arange(12))
    )
    return {check.name: check for check in results}


def test_a_good_model_raises_no_alarm(linear: Linear) -> None:
    results = _run(linear.eval(), linear)
    assert len(results) == 7 and not any(check.alarm for check in results.values())
    assert all(check.explanation for check in results.values())


@pytest.mark.parametrize(
    "fault",
    ["randomness", "batch-size dependence", "probabilities for logits", "vanishing gradients"],
)
def test_a_fault_raises_its_alarm(fault: str, linear: Linear) -> None:
    results = _run(Faulty(linear, fault).eval(), linear)
    assert results[fault].alarm and results[fault].value > 0


def test_classes_alone_are_no_probabilities(linear: Linear) -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = linear(x)
            return 0 * z + nn.functional.one_hot(z.argmax(dim=1), z.shape[1])

    assert not _run(Classes().eval(), linear)["probabilities for logits"].alarm


def test_train_mode_is_reported_and_restored(linear: Linear) -> None:
    model = linear.train()
    assert _run(model, linear)["train mode"].alarm and model.training


class InfiniteLogits(nn.Module):
    """One class is impossible for every image, and a second one sometimes."""

    def __init__(self, base: nn.Module, fault: str) -> None:
        super().__init__()
        self.base, self.fault, self.calls = base, fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z: Tensor = self.base(x).clone()
        z[:, 5] = -torch.inf
        match self.fault:
            case "randomness":
                z = z + 0.1 * self.calls
            case "random infinities" if self.calls % 2:
                z[:, 4] = -torch.inf
            case "batch-size dependence":
                z = z + 0.1 * len(x)
        return z


def test_infinite_logits_raise_an_alarm_of_their_own_only(linear: Linear) -> None:
    results = _run(InfiniteLogits(linear, "none").eval(), linear)
    assert results["infinite logits"].value == 1 and results["infinite logits"].alarm
    assert not results["randomness"].alarm and not results["batch-size dependence"].alarm
    assert all(math.isfinite(check.value) for check in results.values())


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("randomness", "randomness"),
        ("random infinities", "randomness"),
        ("batch-size dependence", "batch-size dependence"),
    ],
)
def test_infinite_logits_hide_no_other_fault(fault: str, name: str, linear: Linear) -> None:
    assert _run(InfiniteLogits(linear, fault).eval(), linear)[name].alarm


def test_infinite_logits_with_a_surrogate_raise_no_alarm(linear: Linear) -> None:
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double()
    results = run_sanity_checks(
        HardDecision(linear),
        x,
        linear(x).argmax(1),
        threat=Threat("linf", 0.02),
        surrogate=linear,
        stream=stream(0, "s", torch.arange(4)),
    )
    infinite = next(check for check in results if check.name == "infinite logits")
    assert infinite.value == 1 and not infinite.alarm and "surrogate" in infinite.explanation
    assert all(math.isfinite(check.value) for check in results)


class RobustFarAway(nn.Module):
    """Far from the image the prediction is correct again, so that a larger budget is a worse
    attack."""

    def forward(self, x: Tensor) -> Tensor:
        distance = (x - 0.5).flatten(1).abs().mean(dim=1)
        wrong = ((distance > 0.01) & (distance < 0.03)).to(x.dtype) * 2 - 1 + distance * 0.01
        return torch.stack([-wrong, wrong], dim=1)


def test_accuracy_that_rises_with_the_budget() -> None:
    x, y = torch.full((8, 3, 5, 7), 0.5), torch.zeros(8, dtype=torch.int64)
    results = run_sanity_checks(
        RobustFarAway(), x, y, threat=Threat("linf", 0.025), stream=stream(0, "s", torch.arange(8))
    )
    rise = next(check for check in results if check.name == "accuracy rises with budget")
    assert rise.alarm and rise.value > 0.5


def test_larger_budgets_stay_inside_the_box(linear: Linear) -> None:
    """Four times 0.3 would be no valid radius."""
    x = torch.rand(8, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    results = run_sanity_checks(
        linear,
        x,
        linear(x).argmax(1),
        threat=Threat("linf", 0.3),
        stream=stream(0, "s", torch.arange(8)),
    )
    assert len(results) == 7


def test_black_box_check() -> None:
    assert not black_box_check({"apgd-ce": 5, "targeted-2": 1}, survived=4).alarm
    for name in ("square", "square@100", "inner/square@100"):
        check = black_box_check({"apgd-ce": 5, name: 1}, survived=3)
        assert check.alarm and check.value == 0.25
