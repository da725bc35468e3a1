"""How the run was made: enough to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from equipoise.reporting.section import Cell, Section, Table
from equipoise.reporting.view import RunView


def provenance(view: RunView) -> Section:
    """Everything `run.toml` says, and the command to repeat it where the run wrote it down."""
    prose = ["Runs that agree in their identity are the same run; settings, versions among them, may differ between "
             "sittings. This page was made from the run folder alone."]
    if "seconds" in view.summary:
        prose.append(f"The sitting that finished the run took {view.summary['seconds']} seconds.")
    settings = {key: value for key, value in view.settings.items() if key != "command"}
    tables = [_table("What makes it this run.", "identity", view.identity),
              _table("What may differ.", "settings", settings)]
    command = view.settings.get("command", "")
    code = command if isinstance(command, str) else shlex.join(map(str, command))
    return Section("How this was made", prose, [table for table in tables if table.body], code=code)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted keys, lists as words between commas."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def _table(caption: str, name: str, told: Mapping[str, Any]) -> Table:
    body = [[Cell(key), Cell(value)] for key, value in flat(told).items()]
    return Table(caption, [name, "value"], body, words=True)
