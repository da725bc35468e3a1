"""Logs of unfinished attacks: what their finished stages found about images that are not decided
yet."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.attacks import Attack, AttackState
from equipoise.core import checks, config, files, serialize
from equipoise.core.records import Run
from equipoise.core.serialize import Count
from equipoise.data import Dataset
from equipoise.evaluation.job import Job

STAGES = "stages"


@dataclass(frozen=True)
class _StageEntry:
    """One line of a stage log."""

    job: tuple[Any, ...]
    index: tuple[Count, ...]
    next_stage: tuple[Count, ...]
    predicted: tuple[Count, ...]
    margin: tuple[float, ...]
    logit_margin: tuple[float, ...]
    clean_logit_margin: tuple[float, ...]
    passes: tuple[float, ...]


class StageLog:
    """The log of one attack on one model, one file per process; `known` is the latest state by
    image."""

    FIELDS = tuple(field.name for field in dataclasses.fields(_StageEntry))[2:]  # of an AttackState

    def __init__(self, folder: Path, rank: int, job: Job, attack: Attack, *part: str) -> None:
        self.folder, self.path, self.stages = folder, folder / f"{rank}.jsonl", len(attack.stages())
        self.job = [job.name, job.attack_name, job.alpha, *part]
        if self.path.exists():
            files.remove_incomplete_line(self.path)
        self.known = self._read()

    def write(self, data: Dataset, state: AttackState, rows: Tensor) -> None:
        """Append a line with the state of these rows."""
        if len(rows):
            # JSON has no infinity; margins of hard decisions are the largest number instead.
            entry = {
                "job": self.job,
                "index": data.index[rows].tolist(),
                **{name: getattr(state, name)[rows].nan_to_num().tolist() for name in self.FIELDS},
            }
            files.append_durably(self.path, json.dumps(entry) + "\n")

    def _read(self) -> dict[int, dict[str, float]]:
        """The latest state by image; an incomplete line of another process is skipped."""
        known: dict[int, dict[str, float]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = config.read_text(path).splitlines(keepends=True)
            for number, line in enumerate(lines, start=1):
                if number == len(lines) and not line.endswith("\n"):
                    continue
                where = f"{path}, line {number},"
                entry = serialize.from_plain(_StageEntry, config.parse_json(line, where), where)
                if list(entry.job) != self.job:
                    continue
                columns = [getattr(entry, name) for name in self.FIELDS]
                checks.require(
                    {len(column) for column in columns} == {len(entry.index)}
                    and max(entry.next_stage, default=0) <= self.stages + 1,
                    where,
                    f"be about the {self.stages} stages",
                    line,
                )
                for index, *values in zip(entry.index, *columns, strict=True):
                    if index not in known or values[0] > known[index]["next_stage"]:
                        known[index] = dict(zip(self.FIELDS, values, strict=True))
        return known


def remove_stage_logs(run: Run) -> None:
    """Remove the logs of unfinished stages from a finished run."""
    if run.world.is_leader and (run.folder / STAGES).exists():
        shutil.rmtree(run.folder / STAGES)
