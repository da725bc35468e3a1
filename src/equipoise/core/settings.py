"""Settings as frozen dataclasses that check themselves; their fields are also the options of the
command line."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from equipoise.core import checks


def setting(
    default: Any,
    help: str,
    *,
    least: int = 0,
    most: int = checks.MAX_STEPS,
    positive: bool = False,
    share: bool = False,
    fraction: bool = False,
    among: Iterable[str] | None = None,
) -> Any:
    """A field with its default, the line that `--help` shows, and the values it may take.

    The default `dataclasses.MISSING` makes the setting required. A value must have the type of its
    annotation and be an integer in `least` … `most`, `positive`, a `share` in [0, 1], a `fraction`
    (not negative, may be written "8/255"), or a word `among` these.
    """
    metadata = {
        "help": help,
        "least": least,
        "most": most,
        "positive": positive,
        "share": share,
        "fraction": fraction,
        "among": None if among is None else tuple(among),
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class: checks every field by its annotation and metadata; None, where allowed, is "not
    given"."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _kinds(cls)
        for field in dataclasses.fields(self):
            rule, value, kinds = field.metadata, getattr(self, field.name), hints[field.name]
            if value is None:
                checks.require(type(None) in kinds, field.name, "have a value", None)
                continue
            if rule.get("fraction"):
                value = checks.fraction(field.name, value)
                checks.require(
                    value >= 0 or rule.get("positive", False), field.name, "not be negative", value
                )
                object.__setattr__(self, field.name, value)
            _check_type(field.name, value, kinds - {type(None)}, rule)
            if rule.get("positive"):
                checks.positive(field.name, value)
            if rule.get("share"):
                checks.within(field.name, value, 0, 1)
            if rule.get("among") is not None:
                checks.one_of(field.name, value, rule["among"])

    def to_dict(self) -> dict[str, Any]:
        """The settings that have a value, as they stand in `run.toml`."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def select(cls, values: Mapping[str, Any]) -> Self:
        """Settings from those of the given values that are its own."""
        return cls(**{name: values[name] for name in cls.names() if name in values})


@functools.cache
def _kinds(cls: Any) -> dict[str, frozenset[Any]]:
    """The types that each setting may have."""
    return {
        name: frozenset(typing.get_args(hint) or (hint,))
        for name, hint in typing.get_type_hints(cls).items()
    }


def _check_type(name: str, value: Any, kinds: frozenset[Any], rule: Mapping[str, Any]) -> None:
    """Raise an error unless the value is of a plain type among `kinds`; other types are checked by
    their class."""
    if kinds == {bool}:
        checks.require(isinstance(value, bool), name, "be true or false", value)
    elif kinds == {int} and name == "seed":
        checks.seed(value)
    elif kinds == {int}:
        checks.whole(
            name, value, least=rule.get("least", 0), most=rule.get("most", checks.MAX_COUNT)
        )
    elif kinds == {float}:
        checks.number(name, value)
    elif kinds == {str}:
        checks.require(isinstance(value, str), name, "be text", value)
    elif kinds == {Path}:
        checks.require(isinstance(value, str | Path), name, "be a path", value)


def split(values: Mapping[str, Any], *classes: type[Settings]) -> list[Any]:
    """One object per class from keyword arguments that belong to either; an unknown name is an
    error."""
    known = [name for cls in classes for name in cls.names()]
    for name in values:
        checks.one_of("setting", name, known)
    return [cls.select(values) for cls in classes]
