"""Attacks of other libraries inside this one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import attacks
from equipoise.attacks import Apgd, FunctionAttack, Suite
from equipoise.core.threat import Threat

THREAT = eq.Threat("linf", 0.1)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        return logits


def images(count: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    model, generator = Linear().eval(), torch.Generator().manual_seed(1)
    x = torch.rand(count, 3, 4, 4, generator=generator)
    return model, x, model(x).argmax(dim=1)


def sign_step(
    model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, share: float = 1.0
) -> Tensor:
    """FGSM [Goodfellow2015]."""
    point = x.clone().requires_grad_()
    gradient = torch.autograd.grad(
        nn.functional.cross_entropy(model(point), y, reduction="sum"), point
    )[0]
    return (x + share * threat.eps * gradient.sign()).clamp(0, 1)


def test_a_function_is_an_attack_and_a_member_of_a_suite() -> None:
    model, x, y = images()
    attack = attacks.from_callable(sign_step, share=0.5)
    assert attack.name == "sign_step" and attack.describe()["settings"] == {"share": 0.5}
    expected = sign_step(model, x, y, threat=THREAT, share=0.5)
    assert torch.equal(eq.attack(model, x, y, threat=THREAT, attack=attack), expected)
    suite = Suite((attacks.from_callable(sign_step), Apgd(steps=5)))
    result = eq.evaluate({"m": model}, (x, y), threat=THREAT, attack=[suite, attack], device="cpu")
    broken = int((model(sign_step(model, x, y, threat=THREAT)).argmax(1) != y).sum())
    assert (
        broken > 0
        and sum(getattr(row, "broken_by", None) == "sign_step" for row in result.rows) == broken
    )


def test_gradients_come_from_a_surrogate_if_there_is_one() -> None:
    model, x, y = images()
    called = []

    def record(given: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        called.append(given)
        return x

    other = Linear()
    attack = FunctionAttack(**{**vars(attacks.from_callable(record)), "surrogate": other})
    eq.attack(model, x, y, threat=THREAT, attack=attack)
    assert called == [other]


def test_random_numbers_repeat_and_leave_the_global_state_alone() -> None:
    model, x, y = images()
    attack = attacks.from_callable(
        lambda model, x, y: (x + 0.1 * (2 * torch.rand_like(x) - 1)).clamp(0, 1), "noise"
    )
    state = torch.get_rng_state()
    first, second, other = (
        eq.attack(model, x, y, threat=THREAT, attack=attack, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (5, {}, "`function` must be a function"),
        (lambda model, x, y: x, {}, "`name` must be given"),
        (sign_step, {"share": object()}, "`share` must be a number or text"),
    ],
)
def test_mistakes(function: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(eq.InputError, match=message):
        attacks.from_callable(function, **settings)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda model, x, y: (x + 0.2).clamp(0, 1), "`cheat` must stay within"),
        (lambda model, x, y: x[:1], "shape"),
        (lambda model, x, y: x + 0.1, r"lie in \[0, 1\]"),
        (lambda model, x, y: None, "`result of cheat` must be a tensor"),
    ],
)
def test_results_outside_of_the_ball_are_refused(function: Any, message: str) -> None:
    model, x, y = images()
    with pytest.raises(eq.InputError, match=message):
        eq.attack(model, x, y, threat=THREAT, attack=attacks.from_callable(function, "cheat"))


def test_torchattacks() -> None:
    torchattacks = pytest.importorskip("torchattacks")
    model, x, y = images()
    theirs = torchattacks.FGSM(model, eps=THREAT.eps)(x, y)
    attack = attacks.from_torchattacks(torchattacks.FGSM)
    assert attack.name == "torchattacks-FGSM"
    assert torch.equal(eq.attack(model, x, y, threat=THREAT, attack=attack), theirs)
    pgd = attacks.from_torchattacks(torchattacks.PGD, alpha=0.02, steps=5)
    result = eq.evaluate({"m": model}, (x, y), threat=THREAT, attack=[pgd, attack], device="cpu")
    assert {r.metric for r in result.results} == {
        "clean",
        "torchattacks-PGD",
        "torchattacks-FGSM",
        "worst",
    }
    with pytest.raises(eq.InputError, match="must stay within"):
        eq.attack(
            model, x, y, threat=THREAT, attack=attacks.from_torchattacks(torchattacks.FGSM, eps=0.2)
        )


@pytest.mark.filterwarnings("ignore")
def test_foolbox() -> None:
    foolbox = pytest.importorskip("foolbox")
    model, x, y = images()
    theirs = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    expected = theirs(
        foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=THREAT.eps
    )[1]
    attack = attacks.from_foolbox(theirs)
    with pytest.raises(
        eq.InputError, match="must be an attack in linf, the norm of the threat, got 'l2'"
    ):
        eq.attack(
            model, x, y, threat=THREAT, attack=attacks.from_foolbox(foolbox.attacks.L2PGD(steps=1))
        )
    assert attack.describe()["settings"] == {"random_start": False, "rel_stepsize": 1.0, "steps": 1}
    assert torch.equal(eq.attack(model, x, y, threat=THREAT, attack=attack), expected)


def test_the_protocol_of_foolbox_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is wrapped with bounds (0, 1), the radius is that of the threat, and the clipped
    images are taken."""
    wrapped: dict[str, Any] = {}

    def wrap(model: nn.Module, **settings: Any) -> str:
        wrapped.update(settings, model=model)
        return "fmodel"

    class FoolboxAttack:
        def __init__(self) -> None:
            self.steps = 3

        def __call__(
            self, fmodel: str, images: Tensor, labels: Tensor, *, epsilons: float
        ) -> tuple[Any, Tensor, Any]:
            assert fmodel == "fmodel" and epsilons == THREAT.eps
            return None, (images + epsilons).clamp(0, 1), None

    monkeypatch.setitem(sys.modules, "foolbox", SimpleNamespace(PyTorchModel=wrap))
    model, x, y = images()
    attack = attacks.from_foolbox(FoolboxAttack())
    assert torch.equal(
        eq.attack(model, x, y, threat=THREAT, attack=attack), (x + THREAT.eps).clamp(0, 1)
    )
    assert wrapped == {"model": model, "bounds": (0, 1), "device": torch.device("cpu")}
    assert attack.describe()["settings"] == {"steps": 3} and attack.name == "foolbox-FoolboxAttack"
