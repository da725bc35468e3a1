"""Every symptom is seen where it is, and not where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from conftest import Linear
from equipoise import attacks
from equipoise.attacks import SanityCheck, black_box, run_sanity_checks, straight_through
from equipoise.core.rng import stream
from equipoise.core.threat import Threat


class Wrapped(nn.Module):
    def __init__(self, base: nn.Module, kind: str) -> None:
        super().__init__()
        self.base, self.kind, self.calls = base, kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z: Tensor = self.base(x)
        match self.kind:
            case "randomness":
                return z + torch.sin(torch.tensor(float(self.calls)))
            case "batch-size dependence":
                return z + len(x)
            case "probabilities for logits":
                return torch.softmax(z, dim=1)
            case "vanishing gradients":
                return z.round()
        return z


def _seen(model: nn.Module, linear: Linear) -> dict[str, SanityCheck]:
    x = stream(3, "x", torch.arange(12)).uniform(3, 5, 7).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    found = run_sanity_checks(model, x, y, threat=Threat("linf", 0.02), stream=stream(0, "s", torch.arange(12)))
    return {symptom.name: symptom for symptom in found}


def test_a_healthy_model_has_none(linear: Linear) -> None:
    found = _seen(linear.eval(), linear)
    assert len(found) == 7 and not any(symptom.alarm for symptom in found.values())
    assert set(found["randomness"].facts()) == {"name", "value", "alarm", "says"}


@pytest.mark.parametrize("kind", ["randomness", "batch-size dependence", "probabilities for logits",
                                  "vanishing gradients"])
def test_each_is_seen(kind: str, linear: Linear) -> None:
    found = _seen(Wrapped(linear, kind).eval(), linear)
    assert found[kind].alarm and found[kind].value > 0


def test_train_mode_is_seen_and_left(linear: Linear) -> None:
    model = linear.train()
    assert _seen(model, linear)["train mode"].alarm and model.training


class Forbidding(nn.Module):
    """One class is impossible for every image, and a second one sometimes."""

    def __init__(self, base: nn.Module, kind: str) -> None:
        super().__init__()
        self.base, self.kind, self.calls = base, kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z: Tensor = self.base(x).clone()
        z[:, 5] = -torch.inf
        match self.kind:
            case "randomness":
                z = z + 0.1 * self.calls
            case "random infinities" if self.calls % 2:
                z[:, 4] = -torch.inf
            case "batch-size dependence":
                z = z + 0.1 * len(x)
        return z


def test_infinite_logits_hide_nothing(linear: Linear) -> None:
    calm = _seen(Forbidding(linear, "calm").eval(), linear)
    assert calm["infinite logits"].value == 1 and calm["infinite logits"].alarm
    assert not calm["randomness"].alarm and not calm["batch-size dependence"].alarm
    assert _seen(Forbidding(linear, "randomness").eval(), linear)["randomness"].alarm
    assert _seen(Forbidding(linear, "random infinities").eval(), linear)["randomness"].value == 1
    assert _seen(Forbidding(linear, "batch-size dependence").eval(), linear)["batch-size dependence"].alarm
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double()
    helped = run_sanity_checks(Hard(linear), x, linear(x).argmax(1), threat=Threat("linf", 0.02), surrogate=linear,
                      stream=stream(0, "s", torch.arange(4)))
    told = next(symptom for symptom in helped if symptom.name == "infinite logits")
    assert told.value == 1 and not told.alarm and "surrogate" in told.says
    assert all(math.isfinite(symptom.value) for symptom in [*helped, *calm.values()])


class Folded(nn.Module):
    """Far from the image the answer is right again, so that a larger budget is a worse attack."""

    def forward(self, x: Tensor) -> Tensor:
        away = (x - 0.5).flatten(1).abs().mean(dim=1)
        wrong = ((away > 0.01) & (away < 0.03)).to(x.dtype) * 2 - 1 + away * 0.01
        return torch.stack([-wrong, wrong], dim=1)


def test_accuracy_that_rises_with_the_budget() -> None:
    x, y = torch.full((8, 3, 5, 7), 0.5), torch.zeros(8, dtype=torch.int64)
    found = run_sanity_checks(Folded(), x, y, threat=Threat("linf", 0.025), stream=stream(0, "s", torch.arange(8)))
    rise = next(symptom for symptom in found if symptom.name == "accuracy rises with budget")
    assert rise.alarm and rise.value > 0.5


def test_black_box() -> None:
    assert not black_box({"apgd-ce": 5, "targeted-2": 1}, standing=4).alarm
    found = black_box({"apgd-ce": 5, "square": 1}, standing=3)
    assert found.alarm and found.value == 0.25


def test_straight_through_is_exact_and_has_the_other_gradient(linear: Linear) -> None:
    hard = Hard(linear)
    model = straight_through(hard, linear)
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7).double().requires_grad_()
    assert torch.equal(model(x), hard(x))
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.autograd.grad((model(x) * 0 + 0).nan_to_num().sum() + (model(x).exp() * weights).sum(), x,
                              allow_unused=True)[0]
    two = torch.autograd.grad((linear(x) * weights * hard(x).exp()).sum(), x)[0]
    torch.testing.assert_close(one, two)


class Hard(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        z = self.base(x).detach()
        return torch.zeros_like(z).scatter(1, z.argmax(dim=1, keepdim=True), 1).log()


def test_foreign_attack_through_the_wrapper(linear: Linear) -> None:
    """Plain signed gradient steps, as any foreign library makes them, break a model without gradients."""
    hard = Hard(linear)
    model = straight_through(hard, linear)
    x = stream(3, "x", torch.arange(4)).uniform(3, 5, 7, low=0.4, high=0.6).double()
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    point = x.clone()
    for _ in range(20):
        point.requires_grad_()
        soft = model(point).nan_to_num(neginf=-10.0)
        step = torch.autograd.grad(nn.functional.cross_entropy(soft, y), point)[0]
        point = (point.detach() + 0.01 * step.sign()).clamp(0, 1)
    with torch.no_grad():
        assert bool((hard(point).argmax(dim=1) != y).all())


def test_names() -> None:
    from equipoise.core.checks import InputError

    assert isinstance(attacks.named("fast"), attacks.Suite)
    fold = attacks.named("apgd", steps=7, restarts=2)
    assert isinstance(fold, attacks.Suite) and [stage.name for stage in fold.stages] == ["apgd-ce@7", "apgd-ce-2@7"]
    with pytest.raises(InputError, match="no such setting"):
        attacks.named("standard", steps=7)
    with pytest.raises(InputError, match="did you mean"):
        attacks.named("standart")
    for name in attacks.ATTACKS:
        made = attacks.named(name)
        if isinstance(made, attacks.Suite):
            names = [stage.name for stage in made.stages]
            assert len(set(names)) == len(names)
