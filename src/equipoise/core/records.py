"""What a run leaves on disk: `run.toml` (what was asked), `rows.jsonl` (what was seen), `summary.json`.

Rows are appended as they come, one JSON object per image and attack, so that a killed run loses at
most the batch under way. While it works each process appends to its own file under `parts/`; at the
end all rows are merged in image order. Everything that is written once is written beside, synced and
renamed, so a full disk never damages what was there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core import checks, config, lock, parallel

Row = dict[str, Any]
SCHEMA = 1
KEYS = ("index", "model", "attack")


def write(path: Path, content: str | bytes) -> None:
    """Replace a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class Run:
    """A run folder, opened for writing; one that belongs to another run, or that another command is in, is refused.

    The first of several processes holds the lock for all of them.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`identity` is what makes it the same run; `settings` (device, versions …) may differ."""
        self.folder = Path(folder)
        self.world = parallel.world()
        if self.world.leads:
            self._claim(identity, settings)
        parallel.barrier()
        # Processes of another machine see it only where the folder is shared.
        checks.require(all(parallel.gather((self.folder / "run.toml").exists())), "out",
                       "be a folder that every machine sees", str(self.folder))
        self.done = {key_of(row) for row in read(self.folder)}
        self._part = self.folder / "parts" / f"{self.world.rank}.jsonl"
        parallel.barrier()  # nobody appends before everybody has read

    def _claim(self, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        told = self.folder / "run.toml"
        checks.require(self.folder.is_dir() or not self.folder.exists(), "out", "be a new folder or hold a run",
                       str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock.take(self.folder)
        if told.exists():
            asked_before = config.read(told).get("identity")
            checks.require(isinstance(asked_before, dict), "identity", f"be a table in {told}", asked_before)
            there, here = _flat(asked_before or {}), _flat(identity)
            for key in {**here, **there}:
                if there.get(key) != here.get(key):
                    raise checks.InputError(
                        f"`out` must be a new folder or belong to this run: {self.folder} has "
                        f"{key} = {there.get(key)!r}, this run has {here.get(key)!r}"
                    )
            for part in _parts(self.folder):
                cut_torn_line(part)
        else:
            empty = not any(self.folder.iterdir())
            checks.require(empty, "out", "be a new folder or hold a run", str(self.folder))
        asked = {"schema": SCHEMA, "identity": identity, "settings": settings}
        write(told, config.dumps(asked))

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows in one write, and remember their keys."""
        if not rows:
            return
        self._part.parent.mkdir(exist_ok=True)
        with self._part.open("ab") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        self.done.update(key_of(row) for row in rows)

    def finish(self) -> list[Row]:
        """Wait for every process, merge the parts in image order, and give all rows to every process."""
        parallel.barrier()
        if self.world.leads and _parts(self.folder):
            rows = read(self.folder)
            write(self.folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            shutil.rmtree(self.folder / "parts")
        parallel.barrier()
        return read(self.folder)

    def summarise(self, verb: str, seconds: float, results: Sequence[Row], **more: object) -> None:
        """Write `summary.json`, unless the same results already stand there."""
        if not self.world.leads:
            return
        path = self.folder / "summary.json"
        told = {"schema": SCHEMA, "verb": verb, "seconds": round(seconds, 1), "results": list(results), **more}
        if path.exists():
            there = summary(self.folder)
            if {**there, "seconds": 0} == {**json.loads(json.dumps(told)), "seconds": 0}:
                return
        write(path, json.dumps(told, indent=1) + "\n")


def key_of(row: Row) -> tuple[Any, ...]:
    """What makes a row unique in its run."""
    return (row["index"], row["model"], row["attack"], row.get("alpha"))


def read(folder: Path | str) -> list[Row]:
    """All rows of a run in image order, merged and still in parts; a torn last line of a part is left out."""
    folder = Path(folder)
    found: dict[tuple[Any, ...], Row] = {}
    merged = folder / "rows.jsonl"
    for path in [merged, *_parts(folder)] if merged.exists() else _parts(folder):
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            raise checks.InputError(f"{path} must be JSON lines in UTF-8") from None
        for number, line in enumerate(lines, start=1):
            if path is not merged and number == len(lines) and not line.endswith("\n"):
                continue
            row = _parse(line, path, number)
            found.setdefault(key_of(row), row)
    return [found[key] for key in sorted(found, key=lambda key: tuple(_order(part) for part in key))]


def summary(folder: Path | str) -> dict[str, Any]:
    """The summary of a finished run."""
    path = Path(folder) / "summary.json"
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise checks.InputError(f"{folder} must be a finished run folder: no readable summary.json") from None
    checks.require(isinstance(told, dict), "summary.json", f"be a table in {folder}", type(told).__name__)
    checks.require(told.get("schema") == SCHEMA, "schema", f"be {SCHEMA} in {path}", told.get("schema"))
    return told


def _order(part: Any) -> tuple[bool, Any]:
    return (part is not None, part)


def _parse(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or any(key not in row for key in KEYS):
        raise checks.InputError(f"{path}, line {number}, must be a row with {', '.join(KEYS)}")
    return row


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*.jsonl"))


def cut_torn_line(part: Path) -> None:
    """A killed process may leave half a line; appending to it would spoil the next row."""
    data = part.read_bytes()
    if data and not data.endswith(b"\n"):
        write(part, data[: data.rfind(b"\n") + 1])


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def rows_of(index: Iterable[int], **columns: Iterable[Any] | str | float) -> list[Row]:
    """Rows from columns; a text or a number is the same in every row."""
    numbers = list(index)
    spread = {name: [column] * len(numbers) if isinstance(column, str | float) else list(column)
              for name, column in columns.items()}
    return [{"index": number, **{name: column[i] for name, column in spread.items()}}
            for i, number in enumerate(numbers)]
