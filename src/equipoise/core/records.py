"""Run folders: `run.toml` (what was asked), `rows.jsonl` (typed rows), `summary.json` (results).

Rows are appended as they are computed, so that a killed run loses at most the batch in progress.
While it runs, each process appends to its own file under `parts/`; at the end all rows are merged
in image order.
"""

from __future__ import annotations

import datetime
import json
import shutil
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise import __version__
from equipoise.core import checks, config, files, parallel, progress, results, rows, serialize
from equipoise.core.checks import InputError
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, EpochRow, ImageRow, Row, RowKey

MAX_ROW_BYTES = 1 << 32  # of one file: ten million rows are about a third of it


class Run:
    """A run folder, opened for writing; the first of several processes holds the lock for all of
    them.

    Args:
        folder: new, empty, or the folder of this very run, which is then resumed.
        identity: what makes two runs the same run, as nested tables of plain values.
        settings: what may differ between two starts of the same run (device, versions, …).
        labels: index → label of the images of the run, if its rows are about images; rows of others
            are refused.
    """

    def __init__(
        self,
        folder: Path | str,
        identity: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        labels: Mapping[int, int] | None = None,
    ) -> None:
        self.folder, self.identity = Path(folder), identity
        self.world = parallel.world()
        self._lock = self._claim(identity, settings) if self.world.is_leader else None
        parallel.barrier()
        # Processes of another machine see it only where the folder is shared.
        checks.require(
            all(parallel.gather((self.folder / "run.toml").exists())),
            "out",
            "be a folder that every machine sees",
            str(self.folder),
        )
        self._labels = labels
        # All rows, once they are merged and until more are added
        self._merged: list[Row] | None = None
        self.done: set[RowKey] = {row.key for row in self.read_rows()}
        self._part = self.folder / "parts" / f"{self.world.rank}.jsonl"
        parallel.barrier()  # no process appends before every process has read

    def _claim(
        self, identity: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> files.FolderLock | None:
        checks.require(
            self.folder.is_dir() or not self.folder.exists(),
            "out",
            "be a new folder or hold a run",
            str(self.folder),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = files.lock(self.folder)
        path = self.folder / "run.toml"
        if path.exists():
            self._check_identity(path, identity)
            for part in _parts(self.folder):
                files.remove_incomplete_line(part)
        else:
            checks.require(
                not files.names(self.folder),
                "out",
                "be a new folder or hold a run",
                str(self.folder),
            )
        started = {"date": _date_of(path) or datetime.date.today().isoformat()}
        content = {
            "schema": config.SCHEMA,
            "version": __version__,
            "identity": identity,
            "settings": {**settings, **started},
        }
        files.write_atomic(path, config.dumps(content))
        return lock

    def _check_identity(self, path: Path, identity: Mapping[str, Any]) -> None:
        previous = read_description(path).identity
        there, here = _flatten(previous), _flatten(tomllib.loads(config.dumps(identity)))
        for key in {**here, **there}:
            if there.get(key) != here.get(key):
                name = checks.shorten(key, 60)
                stored = f"{name} = {checks.shown(there[key])}" if key in there else f"no {name}"
                own = checks.shown(here[key]) if key in here else "none"
                raise InputError(
                    f"`out` must be a new folder or belong to this run: {self.folder} has {stored}, this "
                    f"run has {own}"
                )

    def note_resumed(self, keys: Collection[RowKey]) -> None:
        """Show how many of the rows with these keys the folder has already, if it has some."""
        if 0 < (done := sum(key in self.done for key in keys)) < len(keys):
            progress.note(f"resuming: {done} of {len(keys)} rows")

    def append(self, new: Iterable[Row]) -> None:
        """Add rows in one write; rows that the run already has are skipped."""
        missing = [row for row in new if row.key not in self.done]
        if missing:
            files.append_durably(self._part, "".join(row.to_json() + "\n" for row in missing))
            self.done.update(row.key for row in missing)
            self._merged = None

    def finish(self) -> list[Row]:
        """Wait for every process, merge the parts in image order, and return all rows in every
        process."""
        parallel.barrier()
        parts = self.folder / "parts"
        if self.world.is_leader and parts.exists():
            if _parts(self.folder):
                self._merged = self.read_rows()
                files.write_atomic(
                    self.folder / "rows.jsonl",
                    "".join(row.to_json() + "\n" for row in self._merged),
                )
            shutil.rmtree(parts)
        parallel.barrier()
        # Another process may have merged rows since
        if self._merged is None or self.world.size > 1:
            self._merged = self.read_rows()
        return list(self._merged)

    def read_rows(self) -> list[Row]:
        """The rows so far, of all processes; those of another run are refused."""
        return read_rows(self.folder, self.identity, self._labels)

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


def _date_of(path: Path) -> str | None:
    """The day on which a run was started first, if it is recorded."""
    date = read_description(path).settings.get("date") if path.exists() else None
    return date if isinstance(date, str) else None


@contextmanager
def nothing_left_on_refusal(out: Path | str | None) -> Iterator[None]:
    """An :class:`InputError` inside removes the folder `out` again, and new parents, unless there
    are results in it."""
    folders = [] if out is None else [Path(out), *Path(out).parents]
    new = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except InputError:
        if (
            new
            and parallel.world().is_leader
            and all(path.is_dir() or path.name == "run.toml" for path in new[0].rglob("*"))
        ):
            shutil.rmtree(new[0], ignore_errors=True)
            for parent in new[1:]:
                with suppress(OSError):  # not empty: another command uses it too
                    parent.rmdir()
        raise


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The content of `run.toml`."""

    schema: int
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    version: str | None = None  # of Equipoise


def read_description(path: Path) -> RunDescription:
    """Read a `run.toml`."""
    table = config.read(path)
    config.check_schema(table, path)
    return serialize.from_plain(RunDescription, table, str(path))


def read_rows(
    folder: Path | str,
    identity: Mapping[str, Any] | None = None,
    labels: Mapping[int, int] | None = None,
) -> list[Row]:
    """All rows of a run in image order, merged or still in parts; an incomplete last line of a part
    is skipped.

    Two different rows of one key are an error, and so are two labels of one image, and rows that do
    not belong to the run's `identity` or are about images that are not in `labels`, where these are
    given.
    """
    folder = Path(folder)
    seen: dict[int, int] = {}
    by_key: dict[RowKey, Row] = {}
    merged = folder / "rows.jsonl"
    for path in [merged, *_parts(folder)] if merged.exists() else _parts(folder):
        lines = config.read_text(path, MAX_ROW_BYTES).splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if path is not merged and number == len(lines) and not line.endswith("\n"):
                continue
            where = f"{path}, line {number},"
            row = rows.parse(line, where)
            if by_key.setdefault(row.key, row) != row:
                raise InputError(
                    f"{where} must not contradict an earlier row, got two of index {row.index}, model "
                    f"{checks.shown(row.model)} and attack {checks.shown(row.attack)}"
                )
            if isinstance(row, ImageRow) and seen.setdefault(row.index, row.label) != row.label:
                raise InputError(
                    f"{where} must not contradict an earlier row, got two labels of index {row.index}"
                )
            if not (_belongs_to(row, identity or {}) and _is_known_image(row, labels)):
                raise InputError(
                    f"{where} must belong to this run, got a row of another: index {row.index}, model "
                    f"{checks.shown(row.model)}, attack {checks.shown(row.attack)}"
                )
    return sorted(by_key.values(), key=_image_order)


def _belongs_to(row: Row, identity: Mapping[str, Any]) -> bool:
    """Whether a run of this identity can have the row, as far as the identity says."""
    models, attacks, plan = (identity.get(key) for key in ("models", "attacks", "plan"))
    if isinstance(row, AttackRow) and isinstance(attacks, Mapping):
        known = attacks.get(row.model if row.alpha is None else f"{row.model}@{row.alpha!r}")
        return isinstance(known, Mapping) and row.attack in known
    if identity.get("command") in ("certify", "estimate") and isinstance(models, Mapping):
        return row.model in models
    if (
        identity.get("command") == "train"
        and isinstance(plan, Mapping)
        and type(plan.get("epochs")) is int
    ):
        return isinstance(row, EpochRow) and row.index < plan["epochs"]
    return True


def _is_known_image(row: Row, labels: Mapping[int, int] | None) -> bool:
    return labels is None or not isinstance(row, ImageRow) or labels.get(row.index) == row.label


def _image_order(row: Row) -> tuple[int, str, str, bool, float]:
    return row.index, row.model, row.attack, row.alpha is not None, row.alpha or 0.0


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*.jsonl"))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat
