"""Attacks of other libraries, and any function, as attacks of this package.

    attacks.from_callable(my_attack)                              # my_attack(model, x, y) → x_adv
    attacks.from_torchattacks(torchattacks.PGD, steps=20)         # a class of torchattacks with its
    settings attacks.from_foolbox(foolbox.attacks.LinfPGD(steps=20))       # an attack of foolbox

Each can be given to `equipoise.attack` and `equipoise.evaluate`, alone or in a suite with others.
What such an attack returns must stay inside the ball and [0, 1], and success is judged by the model
itself, as for every attack.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks.batch_attacks import FunctionAttack
from equipoise.attacks.gradients import Extra
from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

_PLAIN = (bool, int, float, str)
_FOOLBOX_NORMS: dict[float | None, str] = {
    math.inf: "linf",
    2: "l2",
    1: "l1",
}  # by the p of their distance


def from_callable(
    function: Callable[..., Tensor], name: str | None = None, **settings: Any
) -> FunctionAttack:
    """A function (model, x, y, **settings) → x_adv as an attack; if it has a parameter `threat`, it
    is passed too.

    Where an attack takes its gradients from a surrogate, the function gets the surrogate as its
    model. The random state of torch is set from the random stream of the images for the call, and
    restored. `settings` are numbers or text, and belong to the identity of a run, as does `name`,
    which is that of the function if it is not given.
    """
    checks.require(
        callable(function),
        "function",
        "be a function (model, x, y) → x_adv",
        type(function).__name__,
    )
    name = getattr(function, "__name__", type(function).__name__) if name is None else name
    checks.instance("name", name, str, "be text")
    checks.require(name != "<lambda>", "name", "be given for a function without one", name)
    for key, value in settings.items():
        checks.instance(key, value, _PLAIN, "be a number or text")
    takes_threat = "threat" in _parameters(function)

    def run(
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        threat: Threat,
        stream: Stream,
        surrogate: nn.Module | None,
        extra: Extra | None,
    ) -> Tensor:
        checks.require(
            extra is None,
            name,
            "be an attack of this package where a term is added to the objective",
            type(extra).__name__,
        )
        more = {"threat": threat} if takes_threat else {}
        with _seeded(stream, x.device), torch.enable_grad():
            x_adv = function(model if surrogate is None else surrogate, x, y, **settings, **more)
        checks.instance(f"result of {name}", x_adv, Tensor, "be a tensor")
        return x_adv.detach().to(x).contiguous()

    return FunctionAttack(name, run, settings)


def from_torchattacks(
    cls: Callable[..., Any], name: str | None = None, **settings: Any
) -> FunctionAttack:
    """A class of torchattacks such as `torchattacks.PGD`, with its settings; `eps` is that of the
    threat if not given.

    `atk = torchattacks.PGD(model, eps=8/255, steps=20); atk(images, labels)` becomes
    `equipoise.attack(model, images, labels, threat=Threat("linf", "8/255"),
    attack=from_torchattacks(PGD, steps=20))`.
    """
    checks.require(callable(cls), "cls", "be a class of torchattacks", type(cls).__name__)
    takes_eps = "eps" in _parameters(cls) and "eps" not in settings

    def run(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, **given: Any) -> Tensor:
        attack = cls(model, **given, **({"eps": threat.eps} if takes_eps else {}))
        if hasattr(attack, "set_device"):  # found by itself only where a model has weights
            attack.set_device(x.device)
        x_adv: Tensor = attack(x, y)
        return x_adv

    return from_callable(run, f"torchattacks-{cls.__name__}" if name is None else name, **settings)


def from_foolbox(attack: Callable[..., Any], name: str | None = None) -> FunctionAttack:
    """An attack of foolbox such as `foolbox.attacks.LinfPGD(steps=20)`; `epsilons` is the radius of
    the threat.

    `attack(fmodel, images, labels, epsilons=8/255)` becomes `equipoise.attack(model, images,
    labels, threat=Threat("linf", "8/255"), attack=from_foolbox(attack))`. The model is wrapped as
    `foolbox.PyTorchModel` with bounds (0, 1).
    """
    checks.require(callable(attack), "attack", "be an attack of foolbox", type(attack).__name__)

    def run(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, **settings: Any) -> Tensor:
        norm: str = _FOOLBOX_NORMS.get(
            getattr(getattr(attack, "distance", None), "p", None), threat.norm
        )
        checks.require(
            norm == threat.norm,
            known_as,
            f"be an attack in {threat.norm}, the norm of the threat",
            norm,
        )
        fmodel = import_module("foolbox").PyTorchModel(model, bounds=(0, 1), device=x.device)
        clipped: Tensor = attack(fmodel, x, y, epsilons=threat.eps)[1]
        return clipped

    known_as = f"foolbox-{type(attack).__name__}" if name is None else name
    values = {
        key: value
        for key, value in getattr(attack, "__dict__", {}).items()
        if isinstance(value, _PLAIN)
    }
    made = from_callable(run, known_as)
    return FunctionAttack(made.name, made.function, values)


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in functions have no signature
        return set()


@contextmanager
def _seeded(stream: Stream, device: torch.device) -> Iterator[None]:
    """The random state of torch as a function of the images, restored at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(stream.words(1)[0]) if len(stream) else 0)
        yield
