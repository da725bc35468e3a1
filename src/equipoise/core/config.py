"""TOML files: read strictly, written with plain values first and one section per nested table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.core import checks


def read(path: Path) -> dict[str, Any]:
    """A TOML file as a table."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise checks.InputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise checks.InputError(f"{path} must be TOML: {error}") from None


def dumps(table: Mapping[str, Any]) -> str:
    """The table as TOML: plain values first, then one section per nested table."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items()
             if value is not None and not isinstance(value, Mapping)]
    for name, nested in table.items():
        if isinstance(nested, Mapping):
            here = (*path, _key(name))
            lines += ["", f"[{'.'.join(here)}]", *_lines(nested, here)]
    return lines


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(float(value))  # a numpy float has another repr
        case int():
            return repr(int(value))
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{ {inner} }}"
    raise TypeError(f"no TOML for {value!r}")
