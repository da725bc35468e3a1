"""Settings on disk: TOML, read strictly and written plainly."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from equipoise.core import checks


def read(path: Path) -> dict[str, Any]:
    """A TOML file as a table; a missing or malformed one is one sentence."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise checks.InputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise checks.InputError(f"{path} must be TOML: {error}") from None


def known(table: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    """Refuse keys that nobody reads; a near miss is named."""
    options = list(allowed)
    for key in table:
        if key not in options:
            checks.one_of(f"key in {where}", key, options)


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
            return repr(float(value))  # a numpy float is a float, too, and writes itself otherwise
        case int():
            return repr(int(value))
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {value!r}")
