from __future__ import annotations

from dataclasses import dataclass

import pytest

from equipoise.core.checks import InputError
from equipoise.core.settings import Settings, setting, split


@dataclass(frozen=True, kw_only=True)
class Ball(Settings):
    eps: float = setting(8 / 255, "Radius.", fraction=True, positive=True)
    norm: str = setting("linf", "Norm.", among=("linf", "l2"))
    steps: int | None = setting(None, "Steps.", least=1)


@dataclass(frozen=True, kw_only=True)
class Weights(Settings):
    momentum: float = setting(0.9, "Momentum.", share=True)


def test_fractions_become_numbers() -> None:
    assert Ball(eps="4/255").eps == 4 / 255  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eps": -1}, "`eps` must be positive, got -1"),
        ({"eps": "8/0"}, "`eps` must be a number or a fraction"),
        ({"norm": "l3"}, "`norm` must be one of l2, linf, got 'l3'"),
        ({"steps": 0}, "`steps` must be a whole number"),
    ],
)
def test_values_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ball(**values)  # type: ignore[arg-type]


def test_settings_without_a_value_are_left_out() -> None:
    assert Ball().to_dict() == {"eps": 8 / 255, "norm": "linf"}


def test_keyword_arguments_are_split_by_class() -> None:
    ball, weights = split({"steps": 3, "momentum": 0.5}, Ball, Weights)
    assert ball == Ball(steps=3) and weights == Weights(momentum=0.5)
    with pytest.raises(InputError, match=r"did you mean 'momentum'\?"):
        split({"momentun": 0.5}, Ball, Weights)
