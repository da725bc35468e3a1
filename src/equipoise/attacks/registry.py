"""Attacks by name, and the suites with a name of their own: AutoAttack and its fast version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from equipoise.attacks.apgd import Apgd
from equipoise.attacks.fab import Fab
from equipoise.attacks.pgd import Pgd
from equipoise.attacks.square import Square
from equipoise.attacks.suite import Attack, Suite
from equipoise.attacks.targeted import TargetedApgd, first_ranks
from equipoise.core import checks
from equipoise.core.registry import Registry


def standard() -> Suite:
    """AutoAttack [Croce2020]: APGD-CE, APGD-T, FAB-T (100 steps, 9 targets each) and Square (5000 queries)."""
    return Suite((Apgd(), TargetedApgd(), Fab(), Square()))


def fast() -> Suite:
    """The verdict of AutoAttack for a fraction of the passes.

    A short run on the probability margin breaks almost everything that can be broken. Then every target gets a short
    run, the nearest by linearised distance first. Only images whose smallest margin so far is near the boundary get
    long runs and FAB. A short Square run remains for every image: where it breaks anything, gradients are masked, and
    the standard version should be run.
    """
    near, nearer = 0.1, 0.03
    return Suite((
        Apgd("margin", 20),
        TargetedApgd(20, (1, 2, 3), "distance"),
        Apgd("ce", 20),
        TargetedApgd(10, (4, 5, 6, 7, 8, 9), "distance"),
        Apgd("margin", 100, margin_below=near),
        TargetedApgd(50, (1, 2, 3, 4), "distance", margin_below=near),
        TargetedApgd(100, (1, 2, 3), "distance", margin_below=nearer),
        Fab(30, (1, 2), margin_below=nearer),
        Square(100),
    ))


def _targeted(*, steps: int = 100, targets: int = 9, order: str = "logits") -> TargetedApgd:
    return TargetedApgd(steps, first_ranks(targets), order)


def _fab(*, steps: int = 100, targets: int = 9) -> Fab:
    return Fab(steps, first_ranks(targets))


def _square(*, steps: int = 5000, share: float = 0.8, restarts: int = 1) -> Square:
    """A step of random search is a query."""
    return Square(checks.whole("steps", steps, least=1), share, restarts)


ATTACKS: Registry[Callable[..., Attack]] = Registry("equipoise.attacks", "attack", {
    "standard": standard, "fast": fast, "apgd": Apgd, "targeted": _targeted, "fab": _fab, "square": _square,
    "pgd": Pgd})


def make_attack(name: str, **settings: Any) -> Attack:
    """The attack of that name with settings such as `steps=50`; those that are None keep their default."""
    make = ATTACKS.get_entry(name)
    known = inspect.signature(make).parameters
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        checks.require(key in known, key, f"be left out for the attack {name}, which has no such setting", value)
    return make(**given)
