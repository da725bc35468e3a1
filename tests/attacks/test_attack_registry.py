from __future__ import annotations

import pytest

from equipoise.attacks import (
    ATTACKS,
    Apgd,
    Fab,
    Pgd,
    Square,
    TargetedApgd,
    fast,
    make_attack,
    standard,
)
from equipoise.core.checks import InputError


def test_settings_by_name() -> None:
    assert make_attack("apgd", steps=7, restarts=2) == Apgd(steps=7, restarts=2)
    assert make_attack("pgd", steps=None) == Pgd(), "None keeps the default"
    assert make_attack("targeted", steps=5, targets=2) == TargetedApgd(5, (1, 2))
    assert make_attack("fab", targets=1) == Fab(ranks=(1,))
    assert make_attack("square", steps=50) == Square(50), "a step of Square is a query"
    assert make_attack("fast") == fast()


def test_unknown_names_and_settings_are_errors() -> None:
    with pytest.raises(InputError, match="no such setting"):
        make_attack("standard", steps=7)
    with pytest.raises(InputError, match="did you mean"):
        make_attack("standart")


@pytest.mark.parametrize("name", ATTACKS)
def test_stages_have_different_names(name: str) -> None:
    names = [stage.name for stage in make_attack(name).stages()]
    assert names and len(set(names)) == len(names)


def test_standard_is_autoattack() -> None:
    names = [stage.name for stage in standard().stages()]
    assert names == [
        "apgd-ce",
        *(f"targeted-{rank}" for rank in range(1, 10)),
        *(f"fab-{rank}" for rank in range(1, 10)),
        "square",
    ]


def test_standard_in_l1_has_more_starts_and_fewer_targets() -> None:
    names = [stage.name for stage in make_attack("standard", norm="l1").stages()]
    assert names == [
        "apgd-ce",
        *(f"apgd-ce-{start}" for start in range(2, 6)),
        *(f"targeted-{rank}" for rank in range(1, 6)),
        *(f"fab-{rank}" for rank in range(1, 10)),
        "square",
    ]
    assert make_attack("standard", norm="l2") == standard()
    assert make_attack("pgd", norm="l1") == Pgd(), "an attack that is the same for all norms"


def test_autoattack_is_another_name_of_standard() -> None:
    assert make_attack("autoattack") == make_attack("standard")
