"""`equipoise.attack` on tensors, as users of torchattacks and foolbox call attacks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from small_models import SmallNet, random_images
from torch import Tensor

import equipoise as eq
from equipoise.attacks import Apgd, Attack, Square
from equipoise.core.threat import Threat
from equipoise.data import pixels

THREAT = Threat("linf", 0.05)


def example() -> tuple[SmallNet, Tensor, Tensor]:
    model, x = SmallNet().eval(), pixels(random_images().images) * 0.99  # no longer bytes
    return model, x, model(x).argmax(dim=1)


@pytest.mark.parametrize("attack", ["fast", "pgd", Apgd(steps=5)])
def test_tensors_give_a_tensor_inside_the_ball(attack: Any) -> None:
    model, x, y = example()
    before = x.clone()
    x_adv = eq.attack(model, x.requires_grad_(), y, threat=THREAT, attack=attack)
    x = x.detach()
    assert torch.equal(x, before), "the images of the caller were changed"
    assert isinstance(x_adv, Tensor) and x_adv.shape == x.shape and not x_adv.requires_grad
    assert (
        float((x_adv - x).abs().max()) <= THREAT.eps + 1e-6
        and 0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1
    )
    attacked = eq.attack(model, (x, y), threat=THREAT, attack=attack)
    assert torch.equal(attacked.images, x_adv)
    assert torch.equal(attacked.predicted, model(x_adv).argmax(dim=1))
    assert int(attacked.robust.sum()) < int((model(x).argmax(dim=1) == y).sum())


def test_the_default_is_fast() -> None:
    model, x, y = example()
    assert torch.equal(
        eq.attack(model, x, y, threat=THREAT), eq.attack(model, x, y, threat=THREAT, attack="fast")
    )


@pytest.mark.parametrize("given", ["apgd,square", ["apgd", Square(30)], "apgd,apgd,square"])
def test_several_attacks_run_one_after_the_other(given: str | list[str | Attack]) -> None:
    """Each on the images that those before left."""
    model, x, y = example()
    first = eq.attack(model, (x, y), threat=Threat("linf", 0.03), attack="apgd", steps=20)
    both = eq.attack(model, (x, y), threat=Threat("linf", 0.03), attack=given, steps=20)
    assert 0 < int(both.robust.sum()) <= int(first.robust.sum()) < len(x)
    assert torch.equal(both.images[~first.robust], first.images[~first.robust])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda model, x, y: x,
            "`attack` must be the name of an attack, an Attack (attacks.from_callable",
        ),
        ("apgd,minimum-norm", "`attack` must be alone if it measures radii"),
        ("standard,apgd", "`attack` must name every attack once, also those in a suite"),
    ],
)
def test_what_is_no_attack(given: Any, message: str) -> None:
    model, x, y = example()
    with pytest.raises(eq.InputError, match=re.escape(message)):
        eq.attack(model, x, y, threat=THREAT, attack=given)
    with pytest.raises(
        eq.InputError,
        match=re.escape('be a Threat, such as Threat("linf", "8/255"), got \'tuple\''),
    ):
        eq.attack(model, x, y, threat=("linf", 0.1))  # type: ignore[call-overload]


def test_an_attack_object_has_its_own_settings() -> None:
    model, x, y = example()
    with pytest.raises(
        eq.InputError, match="`steps` must be left out beside an attack object, which has its own"
    ):
        eq.attack(model, x, y, threat=THREAT, attack=Apgd(steps=5), steps=3)


def test_numpy_arrays() -> None:
    model, x, y = example()
    expected = eq.attack(model, x, y, threat=THREAT, attack="pgd", steps=3)
    assert torch.equal(
        eq.attack(model, x.numpy(), y.numpy(), threat=THREAT, attack="pgd", steps=3), expected
    )
    assert expected.numpy().dtype == np.float32


@pytest.mark.parametrize(
    ("given", "labels", "message"),
    [
        ("data", torch.arange(3), "`labels` must be left out beside a data set"),
        ("pair", torch.arange(3), "`labels` must be left out"),
        ("x", torch.arange(3), "`labels` must be as many as"),
        ("x", "y", "`labels` must"),
        ("x", None, "`data` must be a Dataset, a pair of tensors"),
    ],
)
def test_mistakes(given: str, labels: Any, message: str) -> None:
    model, x, y = example()
    data = {"data": random_images(), "pair": (x, y), "x": x}[given]
    with pytest.raises(eq.InputError, match=message):
        eq.attack(model, data, labels, threat=THREAT)


@pytest.mark.gpu
def test_images_return_to_their_device() -> None:
    model, x, y = example()
    for model_device, image_device in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        for attack in ("pgd", "apgd"):
            x_adv = eq.attack(
                model.to(model_device),
                x.to(image_device),
                y.to(image_device),
                threat=THREAT,
                attack=attack,
            )
            assert (
                x_adv.device.type == image_device
                and next(model.parameters()).device.type == model_device
            )


class _Elsewhere(SmallNet):
    """Records where it is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.device.type)
        return super().forward(x)


def test_the_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is there, `auto` would move a model on the CPU; tensors are attacked on the
    device of the model."""
    monkeypatch.setattr(
        "equipoise.evaluation.attacker.resolve", lambda device: torch.device("meta")
    )
    _, x, y = example()
    model = _Elsewhere().eval()
    assert eq.attack(model, x, y, threat=THREAT, attack="pgd", steps=1).device.type == "cpu"
    assert model.seen == {"cpu"}
