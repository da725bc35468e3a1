"""Settings as frozen dataclasses that check themselves; their fields are the options of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from equipoise.core import checks


def setting(default: Any, told: str, *, least: int | None = None, positive: bool = False, share: bool = False,
            fraction: bool = False, among: Iterable[str] | None = None) -> Any:
    """A field with its default, the line that `--help` shows, and what it must be.

    Args:
        default: its value where none is given.
        told: one line for the user.
        least: a whole number of at least this.
        positive: above zero.
        share: in [0, 1].
        fraction: may be written "8/255"; not negative.
        among: one of these words.
    """
    metadata = {"told": told, "least": least, "positive": positive, "share": share, "fraction": fraction,
                "among": None if among is None else tuple(among)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks every field by its metadata; None is always "not given"."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            must, value = field.metadata, getattr(self, field.name)
            if value is None:
                continue
            if must.get("fraction"):
                value = checks.fraction(field.name, value)
                checks.require(value >= 0, field.name, "not be negative", value)
                object.__setattr__(self, field.name, value)
            if must.get("least") is not None:
                checks.whole(field.name, value, least=must["least"])
            if must.get("positive"):
                checks.positive(field.name, value)
            if must.get("share"):
                checks.within(field.name, value, 0, 1)
            if must.get("among") is not None:
                checks.one_of(field.name, value, must["among"])

    def facts(self) -> dict[str, Any]:
        """The settings that were given or have a value, as they stand in `run.toml`."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
