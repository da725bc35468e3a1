"""Attacks by name, and the suites with a name of their own: AutoAttack in three versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equipoise.attacks.apgd import Apgd
from equipoise.attacks.fab import Fab
from equipoise.attacks.minimum_norm import MinimumNorm
from equipoise.attacks.pgd import Pgd
from equipoise.attacks.randomized import EOT, MAX_PASSES, REPEATS
from equipoise.attacks.square import Square
from equipoise.attacks.suite import Attack, Suite
from equipoise.attacks.targeted import TargetedApgd, first_ranks
from equipoise.core import checks
from equipoise.core.registry import Registry


def standard(*, norm: str = "linf") -> Suite:
    """AutoAttack [Croce2020]: APGD-CE, APGD-T, FAB-T (100 steps, 9 targets each) and Square (5000
    queries).

    In ℓ1 APGD-CE has five starts and APGD-T five targets [Croce2021].
    """
    if norm == "l1":
        return Suite((Apgd(restarts=5), TargetedApgd(ranks=first_ranks(5)), Fab(), Square()))
    return Suite((Apgd(), TargetedApgd(), Fab(), Square()))


def fast() -> Suite:
    """The verdict of AutoAttack for a fraction of the passes.

    A short run on the margin breaks almost everything that can be broken. Then the nearest targets
    by linearised distance get short runs, and the nearest of all a run of FAB. Only images that
    have lost a good part of their clean margin get longer runs. A short Square run remains for
    every image: where it breaks anything, gradients are masked, and the standard version should be
    run.

    Nothing here depends on the scale of the logits, as long as it is one scale for all images: one
    that follows their own margin can hide the nearest target. What the short runs miss where
    gradients are masked is for the audit of an evaluation to find.
    """
    far, near, nearer = 0.5, 0.25, 0.1
    return Suite(
        (
            Apgd("relative-margin", 20),
            TargetedApgd(20, (1, 2, 3), "distance"),
            Apgd("relative-ce", 20),
            Fab(20, (1,), "distance"),
            TargetedApgd(10, (4, 5, 6, 7, 8, 9), "distance", margin_ratio_below=far),
            Apgd("relative-margin", 100, margin_ratio_below=near),
            TargetedApgd(50, (1, 2, 3, 4), "distance", margin_ratio_below=near),
            TargetedApgd(100, (1, 2, 3), "distance", margin_ratio_below=nearer),
            Fab(30, (1, 2), margin_ratio_below=nearer),
            Square(100),
        )
    )


def rand(*, steps: int = 100, eot: int = EOT, repeats: int = REPEATS) -> Suite:
    """The version of AutoAttack for randomised models: APGD-CE and APGD-DLR with gradients averaged
    over passes."""
    return Suite((Apgd("ce", steps), Apgd("dlr", steps)), eot=eot, repeats=repeats)


def _targeted(*, steps: int = 100, targets: int = 9, order: str = "logits") -> TargetedApgd:
    return TargetedApgd(steps, first_ranks(targets), order)


def _fab(*, steps: int = 100, targets: int = 9) -> Fab:
    return Fab(steps, first_ranks(targets))


def _square(*, steps: int = 5000, share: float = 0.8, restarts: int = 1) -> Square:
    """A step of random search is a query."""
    return Square(checks.whole("steps", steps, least=1), share, restarts)


ATTACKS: Registry[Callable[..., Attack]] = Registry(
    "equipoise.attacks",
    "attack",
    {
        "standard": standard,
        "autoattack": standard,
        "fast": fast,
        "rand": rand,
        "apgd": Apgd,
        "targeted": _targeted,
        "fab": _fab,
        "square": _square,
        "pgd": Pgd,
        "minimum-norm": MinimumNorm,
    },
)


def make_attack(name: str, **settings: Any) -> Attack:
    """The attack of that name with settings such as `steps=50`; those that are None keep their
    default.

    The setting `norm` is that of the threat, for suites that differ by norm; other attacks do not
    need it. Every attack has the settings `eot` and `repeats` for randomised models; see
    :class:`Attack`.
    """
    make = ATTACKS.get_entry(name)
    known = inspect.signature(make).parameters
    given = {
        key: value
        for key, value in settings.items()
        if value is not None and (key != "norm" or key in known)
    }
    eot, repeats = (given.pop(key, None) for key in ("eot", "repeats"))
    for key, value in given.items():
        checks.require(
            key in known,
            key,
            f"be left out for the attack {name}, which has no such setting",
            value,
        )
    attack = make(**given)
    if eot is not None:
        attack = replace(
            attack,
            eot=checks.whole("eot", eot, least=1, most=MAX_PASSES),
            repeats=attack.repeats or REPEATS,
        )
    if repeats is not None:
        attack = replace(attack, repeats=checks.whole("repeats", repeats, least=1, most=MAX_PASSES))
    return attack
