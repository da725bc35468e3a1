"""Run folders: `run.toml` (what was asked), `rows.jsonl` (typed rows), `summary.json` (results).

Rows are appended as they are computed, so that a killed run loses at most the batch in progress. While it runs, each
process appends to its own file under `parts/`; at the end all rows are merged in image order.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from equipoise.core import checks, config, files, parallel, results, rows
from equipoise.core.checks import InputError
from equipoise.core.results import SCHEMA, Summary
from equipoise.core.rows import Row, RowKey


class Run:
    """A run folder, opened for writing; the first of several processes holds the lock for all of them.

    Args:
        folder: new, empty, or the folder of this very run, which is then resumed.
        identity: what makes two runs the same run, as nested tables of plain values.
        settings: what may differ between two starts of the same run (device, versions, …).
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.world = parallel.world()
        self._lock = self._claim(identity, settings) if self.world.is_leader else None
        parallel.barrier()
        # Processes of another machine see it only where the folder is shared.
        checks.require(all(parallel.gather((self.folder / "run.toml").exists())), "out",
                       "be a folder that every machine sees", str(self.folder))
        self.done: set[RowKey] = {row.key for row in read_rows(self.folder)}
        self._part = self.folder / "parts" / f"{self.world.rank}.jsonl"
        parallel.barrier()  # no process appends before every process has read

    def _claim(self, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> files.FolderLock | None:
        checks.require(self.folder.is_dir() or not self.folder.exists(), "out", "be a new folder or hold a run",
                       str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = files.lock(self.folder)
        path = self.folder / "run.toml"
        if path.exists():
            self._check_identity(config.read(path), identity)
            for part in _parts(self.folder):
                files.remove_incomplete_line(part)
        else:
            checks.require(not any(self.folder.iterdir()), "out", "be a new folder or hold a run", str(self.folder))
        content = {"schema": SCHEMA, "identity": identity, "settings": settings}
        files.write_atomic(path, config.dumps(content))
        return lock

    def _check_identity(self, existing: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        if existing.get("schema") != SCHEMA:
            raise InputError(f"`out` must be a new folder: {self.folder} was written by another version of Equipoise "
                             f"(schema {existing.get('schema')}), whose results can be read but not resumed")
        previous = existing.get("identity")
        checks.require(isinstance(previous, dict), "identity", f"be a table in {self.folder / 'run.toml'}", previous)
        there, here = _flatten(previous or {}), _flatten(tomllib.loads(config.dumps(identity)))
        for key in {**here, **there}:
            if there.get(key) != here.get(key):
                raise InputError(f"`out` must be a new folder or belong to this run: {self.folder} has "
                                 f"{key} = {there.get(key)!r}, this run has {here.get(key)!r}")

    def append(self, new: Iterable[Row]) -> None:
        """Add rows in one write; rows that the run already has are skipped."""
        missing = [row for row in new if row.key not in self.done]
        if missing:
            files.append_durably(self._part, "".join(row.to_json() + "\n" for row in missing))
            self.done.update(row.key for row in missing)

    def finish(self) -> list[Row]:
        """Wait for every process, merge the parts in image order, and return all rows in every process."""
        parallel.barrier()
        if self.world.is_leader and _parts(self.folder):
            merged = "".join(row.to_json() + "\n" for row in read_rows(self.folder))
            files.write_atomic(self.folder / "rows.jsonl", merged)
            shutil.rmtree(self.folder / "parts")
        parallel.barrier()
        return read_rows(self.folder)

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`, unless the same results are already there."""
        if not self.world.is_leader:
            return
        path, content = self.folder / "summary.json", json.loads(json.dumps(summary.to_dict()))
        content["seconds"] = round(summary.seconds, 1)
        if path.exists():
            previous = results.read_summary(self.folder).to_dict()
            if {**json.loads(json.dumps(previous)), "seconds": 0} == {**content, "seconds": 0}:
                return
        files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def read_rows(folder: Path | str) -> list[Row]:
    """All rows of a run in image order, merged or still in parts; an incomplete last line of a part is skipped."""
    folder = Path(folder)
    by_key: dict[RowKey, Row] = {}
    merged = folder / "rows.jsonl"
    for path in [merged, *_parts(folder)] if merged.exists() else _parts(folder):
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            raise InputError(f"{path} must be JSON lines in UTF-8") from None
        for number, line in enumerate(lines, start=1):
            if path is not merged and number == len(lines) and not line.endswith("\n"):
                continue
            row = rows.parse(line, f"{path}, line {number},")
            by_key.setdefault(row.key, row)
    return sorted(by_key.values(), key=_image_order)


def _image_order(row: Row) -> tuple[int, str, str, bool, float]:
    return row.index, row.model, row.attack, row.alpha is not None, row.alpha or 0.0


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*.jsonl"))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
