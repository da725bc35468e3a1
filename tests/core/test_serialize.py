"""Plain values become dataclasses only if every key and type is right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from equipoise.core.checks import InputError, require
from equipoise.core.serialize import Count, Share, from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    share: Share
    count: Count = 0

    def __post_init__(self) -> None:
        require(self.count != 13, "count", "not be 13", self.count)


@dataclass(frozen=True)
class Outer:
    name: str
    hard: bool = False
    number: float = 0.0
    whole: int = 0
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)


VALID = Outer("a", True, 1.5, -3, Inner(0.5, 2), (Inner(1.0), Inner(0.0)), {"x": Inner(0.25)})


def test_there_and_back() -> None:
    assert from_plain(Outer, to_plain(VALID), "file") == VALID
    assert from_plain(Outer, {"name": "a", "number": 2}, "file").number == 2.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", 1, "name of file must be text, got 1"),
        ("name", None, "name of file must be text, got None"),
        ("hard", "no", "hard of file must be true or false, got 'no'"),
        ("hard", 1, "hard of file must be true or false"),
        ("number", True, "number of file must be a finite number, got True"),
        ("number", math.nan, "must be a finite number, got nan"),
        ("number", -math.inf, "must be a finite number"),
        ("number", 10**400, "must be a finite number"),
        ("number", 1e308, "must be a finite number"),
        ("whole", 2**63, "whole of file must be a whole number of 64 bits"),
        ("whole", 1.0, "must be a whole number"),
        ("whole", True, "must be a whole number"),
        ("inner", [], r"inner of file must be a table, got \[\]"),
        ("inner", {}, "inner of file must be a table with share"),
        (
            "inner",
            {"share": 1.5},
            "inner.share of file must be a finite number from 0 to 1, got 1.5",
        ),
        (
            "inner",
            {"share": 0, "count": -1},
            "inner.count of file must be a whole number of at least 0, got -1",
        ),
        (
            "inner",
            {"share": 0, "count": 13},
            r"inner of file must be valid \(`count` must not be 13, got 13\)",
        ),
        ("several", {}, "several of file must be a list"),
        (
            "several",
            [{"share": 0}, {"share": "0"}],
            r"several\[1\].share of file must be a finite number",
        ),
        ("table", [], "table of file must be a table"),
        ("table", {"x": {"shar": 0}}, "table.x of file .* unknown key 'shar'"),
        ("unknown", 0, "file must be a table without the unknown key 'unknown'"),
    ],
)
def test_the_key_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_plain(Outer, {**to_plain(VALID), key: value}, "file")
