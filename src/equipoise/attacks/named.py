"""Attacks by the name a user types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from equipoise import checks
from equipoise.attacks.pgd import pgd

ATTACKS: Mapping[str, Callable[..., Tensor]] = {"pgd": pgd}


def named(name: str, **settings: Any) -> Callable[..., Tensor]:
    """The attack of that name with settings such as `steps=50`; those that are None keep their default."""
    attack = ATTACKS[checks.one_of("attack", name, ATTACKS)]
    known = inspect.signature(attack).parameters
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        checks.require(key in known, key, f"be left out for the attack {name}, which has no such setting", value)
    return partial(attack, **given)
