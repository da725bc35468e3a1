"""TOML and JSON files: read strictly; TOML is written with plain values first and one section per
nested table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from equipoise import __version__
from equipoise.core import checks
from equipoise.core.checks import InputError

SCHEMA = 2  # of run.toml, mixture.toml, summary.json and state.pt
MAX_BYTES = 1 << 26  # of one TOML or JSON file: real ones are far smaller
MAX_DEPTH = 50  # of nested tables and lists


def read(path: Path) -> dict[str, Any]:
    """A TOML file as a table."""
    table: dict[str, Any] = _parse(tomllib.loads, read_text(path), f"{path} must be TOML")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one table."""
    table = parse_json(read_text(path), str(path))
    if not isinstance(table, dict):
        raise InputError(f"{path} must be a table, got {checks.shown(table)}")
    return table


def parse_json(text: str, where: str) -> Any:
    """A JSON value: no NaN or infinity, and no key twice in one table."""
    return _parse(_strict_json, text, f"{where} must be JSON")


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """A UTF-8 file of at most `most` bytes; anything else is an :class:`InputError`."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(
                f"{path} must be a file, got {'a folder' if path.is_dir() else 'something else'}"
            )
        if (size := path.stat().st_size) > most:
            raise InputError(f"{path} must have at most {most >> 20} MiB, got {size >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} must be text in UTF-8: {error.reason} at byte {error.start}"
        ) from None


def check_schema(table: Mapping[str, Any], path: Path) -> None:
    """Refuse a file that an older or a newer version of Equipoise wrote in another schema."""
    schema = table.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise InputError(f"`schema` must be {SCHEMA} in {path}, got {checks.shown(schema)}")
    if schema < SCHEMA:
        raise InputError(
            f"{path} was written by an old version of Equipoise (schema {schema}), which is no longer "
            "read: run its command again in a new folder"
        )
    if schema > SCHEMA:
        version = str(table.get("version", __version__))
        writer = (
            f"by Equipoise {checks.shorten(version, 40)}"
            if version != __version__
            else "by a newer version of Equipoise"
        )
        raise InputError(
            f"{path} was written {writer} (schema {checks.shown(schema)}) and needs that version; this is "
            f"{__version__}, which reads schema {SCHEMA}"
        )


def _parse(parser: Callable[[str], Any], text: str, must: str) -> Any:
    try:
        value = parser(text)
        if _depth(value) <= MAX_DEPTH:
            return value
    except ValueError as error:  # also of the decoders
        raise InputError(f"{must}: {error}") from None
    except RecursionError:
        pass
    raise InputError(f"{must} with at most {MAX_DEPTH} levels of nested tables and lists, got more")


def _depth(value: Any) -> int:
    """Without recursion, because a TOML key such as a.a.a.a nests one table per dot."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list) and item]:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("an object holds a key twice")
    return table


def dumps(table: Mapping[str, Any]) -> str:
    """The table as TOML: plain values first, then one section per nested table."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [
        f"{_key(key)} = {_value(value)}"
        for key, value in table.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    for name, nested in table.items():
        if isinstance(nested, Mapping):
            here = (*path, _key(name))
            lines += ["", f"[{'.'.join(here)}]", *_lines(nested, here)]
    return lines


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _quoted(key)


def _quoted(text: str) -> str:
    """Any text as a TOML string; bytes of a file name that are not UTF-8 become visible escapes."""
    valid = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return json.dumps(valid, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # which JSON allows and TOML does not


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(float(value))  # a numpy float has another repr
        case int():
            return repr(int(value))
        case str() | Path():
            return _quoted(str(value))
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case Mapping():
            inner = ", ".join(
                f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None
            )
            return f"{{ {inner} }}"
    raise TypeError(f"no TOML for {value!r}")
