"""Dataclasses as plain JSON or TOML values and back, checked against their type hints."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from equipoise.core import checks
from equipoise.core.checks import InputError

T = TypeVar("T")
Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class Bounds:
    """The closed interval that a number read from a file lies in, as part of a type hint."""

    least: float = -math.inf
    most: float = math.inf


ANY = Bounds()
Count = Annotated[int, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]
NonNegative = Annotated[float, Bounds(0)]
INT64 = Bounds(-(2**63), 2**63 - 1)
LARGEST = 1e100  # no measured number is larger, and sums and squares of these are finite


class _MismatchError(Exception):
    """A value that does not have the expected type; `path` is collected on the way up."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(expected)
        self.expected, self.value, self.path = expected, value, ""


def to_plain(value: Any) -> Any:
    """Nested dataclasses, tuples and mappings as dicts and lists; fields that are None or empty are
    left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            name: to_plain(item)
            for name, item in fields
            if item is not None and item != () and item != {}
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], value: Any, where: str) -> T:
    """A value of `cls` (a dataclass, a container of them, or a plain type) from what
    :func:`to_plain` gives.

    Types are exact: true is no number, numbers are finite, and a table holds all keys of a
    dataclass and no other. The error names the key and `where`, usually a file.
    """
    try:
        return typing.cast(T, _reader(typing.cast(Any, cls))(value))
    except _MismatchError as error:
        place = f"{error.path.lstrip('.')} of {where}" if error.path else where
        raise InputError(
            f"{place} must be {error.expected}, got {checks.shown(error.value)}"
        ) from None


@functools.cache
def _reader(hint: Any) -> Reader:
    """The function that checks and converts values of a type; raises :class:`_MismatchError`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _number_reader(arguments[0], *arguments[1:])
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(option for option in arguments if option is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return functools.partial(_read_list, _reader(arguments[0]))
    if origin is dict:
        return functools.partial(_read_table, _reader(arguments[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint)
    if hint in (int, float):
        return _number_reader(hint)
    return functools.partial(_read_plain, hint)


def _read_plain(hint: type[Any], value: Any) -> Any:
    if not isinstance(value, hint):
        raise _MismatchError(
            {str: "text", bool: "true or false"}.get(hint, f"of type {hint.__name__}"), value
        )
    return value


def _number_reader(hint: type[Any], bounds: Bounds = ANY) -> Reader:
    """Whole numbers fit into 64 bits; others are at most :data:`LARGEST`, and may be written as
    whole numbers."""
    whole = hint is int
    least, most = (
        (max(bounds.least, INT64.least), min(bounds.most, INT64.most))
        if whole
        else (bounds.least, bounds.most)
    )
    name = "a whole number" if whole else "a finite number"
    if most == 1:
        name += f" from {bounds.least:g} to {bounds.most:g}"
    elif bounds.least > -math.inf:
        name += f" of at least {bounds.least:g}"
    elif whole:
        name += " of 64 bits"

    def read(value: Any) -> Any:
        if type(value) is not int and (whole or type(value) is not float):
            raise _MismatchError(name, value)
        if not least <= value <= most or not -LARGEST <= value <= LARGEST:
            raise _MismatchError(name, value)
        return value if whole else float(value)

    return read


def _read_list(reader: Reader, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _MismatchError("a list", value)
    return tuple([_read_item(reader, item, f"[{number}]") for number, item in enumerate(value)])


def _read_table(reader: Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _MismatchError("a table", value)
    return {str(key): _read_item(reader, item, f".{key}") for key, item in value.items()}


def _read_item(reader: Reader, item: Any, key: str) -> Any:
    try:
        return reader(item)
    except _MismatchError as error:
        error.path = key + error.path
        raise


def _dataclass_reader(cls: type[Any]) -> Reader:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {
        field.name: (f".{field.name}", _reader(hints[field.name]))
        for field in dataclasses.fields(cls)
    }
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _MismatchError("a table", value)
        for key in value:
            if key not in fields:
                raise _MismatchError(
                    f"a table without the unknown key {checks.shown(key)}", sorted(map(str, value))
                )
        for name in required:
            if name not in value:
                raise _MismatchError(f"a table with {name}", sorted(map(str, value)))
        arguments = {}
        for name, item in value.items():
            key, reader = fields[name]
            arguments[name] = _read_item(reader, item, key)
        try:
            return cls(**arguments)
        except InputError as error:  # the class has checks of its own
            raise _MismatchError(f"valid ({error})", value) from None

    return read
