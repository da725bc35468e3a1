"""Attacks by the name a user types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from equipoise.attacks.apgd import apgd_stages
from equipoise.attacks.auto import VERSIONS
from equipoise.attacks.fab import fab_stages
from equipoise.attacks.pgd import pgd
from equipoise.attacks.square import square_stages
from equipoise.attacks.targeted import targeted_stages
from equipoise.attacks.worst_case import Stage, Suite
from equipoise.core import checks

# Lists of stages keep their batches full across the data set; plain functions see one batch at a time.
STAGED: Mapping[str, Callable[..., Sequence[Stage]]] = {
    **VERSIONS, "apgd": apgd_stages, "targeted": targeted_stages, "fab": fab_stages, "square": square_stages,
}
ATTACKS: Mapping[str, Callable[..., Any]] = {**STAGED, "pgd": pgd}


def named(name: str, **settings: Any) -> Callable[..., Tensor] | Suite:
    """The attack of that name with settings such as `steps=50`; those that are None keep their default."""
    make = ATTACKS[checks.one_of("attack", name, ATTACKS)]
    known = inspect.signature(make).parameters
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        checks.require(key in known, key, f"be left out for the attack {name}, which has no such setting", value)
    return Suite(tuple(STAGED[name](**given))) if name in STAGED else partial(make, **given)
