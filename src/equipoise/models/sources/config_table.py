"""Typed values of the JSON files that come with a published model; an odd value is one sentence
that names its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models.layers.resizing import MAX_SIDE
from equipoise.models.torch_files import require_file

MAX_CONFIG = 10**7  # bytes


@dataclass(frozen=True)
class ConfigTable:
    """A table of JSON; a key that is missing or null has the default value."""

    values: Mapping[str, Any]
    origin: str  # name of the file

    def name(self, key: str) -> str:
        """The key in messages."""
        return f"{key} of {self.origin}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        value = self.values.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value: bool = self.get(key, default)
        checks.require(isinstance(value, bool), self.name(key), "be true or false", value)
        return value

    def whole(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIDE
    ) -> int:
        """A whole number."""
        return checks.whole(self.name(key), self.get(key, default), least=least, most=most)

    def positive(self, key: str, default: float) -> float:
        """A finite number above zero."""
        return float(checks.positive(self.name(key), self.get(key, default)))

    def share(self, key: str, default: float) -> float:
        """The share of an image that is kept; above 1 it is padded."""
        return float(checks.within(self.name(key), self.get(key, default), 0.01, 2))

    def numbers(self, key: str, default: Any = None) -> tuple[float, ...]:
        """A finite number per channel."""
        value = self.get(key, default)
        checks.require(
            isinstance(value, list | tuple) and 0 < len(value) <= 4,
            self.name(key),
            "be a list of one number per channel",
            value,
        )
        return tuple(float(checks.number(self.name(key), number)) for number in value)

    def normalization(
        self, mean: str, std: str, default: tuple[Any, Any] = (None, None)
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and standard deviations, as many of one as of the other."""
        means, deviations = self.numbers(mean, default[0]), self.numbers(std, default[1])
        checks.require(
            len(means) == len(deviations) and min(deviations) > 0,
            self.name(std),
            f"be positive numbers, one for each of {mean}",
            deviations,
        )
        return means, deviations


def read_json(path: Path) -> dict[str, Any]:
    """The table of a JSON file."""
    require_file(path)
    try:
        text = path.read_bytes()
        content = json.loads(text) if len(text) <= MAX_CONFIG else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"`{path}` must hold a table in JSON")
    return content


def all_keys(value: Any) -> Iterator[str]:
    """The keys of a table and of those inside it."""
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    if isinstance(value, Mapping):
        yield from (key for key, content in value.items() if content is not None)
    for one in inner:
        yield from all_keys(one)
