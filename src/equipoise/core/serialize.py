"""Dataclasses as plain JSON or TOML values and back, checked against their type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from equipoise.core.checks import InputError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Nested dataclasses, tuples and mappings as dicts and lists; fields that are None or empty are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: to_plain(item) for name, item in fields if item is not None and item != () and item != {}}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], value: Any, where: str) -> T:
    """A value of `cls` (a dataclass, a container of them, or a plain type) from what :func:`to_plain` gives."""
    return typing.cast(T, _read(cls, value, where))


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read(next(option for option in arguments if option is not type(None)), value, where)
    if origin is tuple:
        _expect(isinstance(value, list | tuple), "a list", value, where)
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin is dict:
        _expect(isinstance(value, Mapping), "a table", value, where)
        return {key: _read(arguments[1], item, where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, value, where)
    allowed = (int, float) if hint is float else hint
    _expect(isinstance(value, allowed) and (hint is bool or not isinstance(value, bool)), hint.__name__, value, where)
    return float(value) if hint is float else value


def _read_dataclass(cls: type[Any], value: Any, where: str) -> Any:
    _expect(isinstance(value, Mapping), "a table", value, where)
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    for key in value:
        _expect(key in fields, f"a table without the unknown key {key!r}", sorted(value), where)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        _expect(name in value or not required, f"a table with {name}", sorted(value), where)
    return cls(**{name: _read(hints[name], item, f"{name} of {where}") for name, item in value.items()})


def _expect(ok: bool, expected: str, value: Any, where: str) -> None:
    if not ok:
        raise InputError(f"{where} must be {expected}, got {value!r}")
