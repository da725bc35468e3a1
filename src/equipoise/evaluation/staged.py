"""A list of attacks over a data set, stage by stage: rows for images that are decided, a journal for the rest.

An image has its row as soon as it is broken or has met every stage. What earlier stages found about images
still standing is noted under `stages/`, so that a killed run repeats at most the stage under way; the
journal goes when the run is finished.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from equipoise.attacks import AttackState, SearchResult, Suite, worst_case
from equipoise.attacks.outcome import fresh
from equipoise.core import parallel
from equipoise.core.records import Row, Run, cut_torn_line, rows_of
from equipoise.data import Dataset
from equipoise.evaluation.job import Conditions, Job

FOLDER = "stages"


def staged(subject: Job, fold: Suite, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Attack every image of `data` that the run has no row for yet; each process takes its share."""
    mine = data.take(run.world.shard(torch.arange(len(data))))
    missing = [row for row, i in enumerate(mine.index.tolist())
               if (i, subject.name, subject.attack, subject.alpha) not in run.done]
    journal = run.folder / FOLDER / f"{run.world.rank}.jsonl"
    if journal.exists():  # a file that this process alone writes to
        cut_torn_line(journal)
    notes = _read(run.folder, subject)
    parallel.barrier()  # nobody writes before everybody has read
    if not missing:
        return
    left = mine.take(torch.tensor(missing))
    outcome = fresh([stage.name for stage in fold.stages], len(left))
    for row, i in enumerate(left.index.tolist()):
        if i in notes:
            passed, predicted, margin = notes[i]
            outcome.passed[row], outcome.predicted[row], outcome.margin[row] = passed, predicted, margin

    def note(number: int, found: SearchResult) -> None:
        over = found.fooled.cpu() | (number == len(fold.stages))
        run.append(_rows(subject, left, outcome, found.jobs[over]))
        if number:
            _write(journal, subject, left, outcome, found.jobs[~over])

    worst_case(
        fold.stages, subject.model, left, threat=conditions.threat, seed=conditions.seed, surrogate=fold.surrogate,
        extra=fold.extra, follow=fold.follow, precision=conditions.precision, batch_size=conditions.batch_size,
        device=conditions.device, whole=data, known=outcome, note=note, title=str(subject))
    undecided = [row for row, i in enumerate(left.index.tolist())
                 if (i, subject.name, subject.attack, subject.alpha) not in run.done]
    run.append(_rows(subject, left, outcome, torch.tensor(undecided, dtype=torch.int64)))


def forget(run: Run) -> None:
    """Remove the journal of a finished run."""
    if run.world.leads:
        shutil.rmtree(run.folder / FOLDER, ignore_errors=True)


def _rows(subject: Job, data: Dataset, outcome: AttackState, rows: torch.Tensor) -> list[Row]:
    part = data.take(rows)
    predicted, numbers = outcome.predicted[rows], rows.tolist()
    found = rows_of(part.index.tolist(), model=subject.name, attack=subject.attack, label=part.labels.tolist(),
                    predicted=predicted.tolist(), correct=[bool(outcome.standing[row]) for row in numbers],
                    margin=[round(value, 6) for value in outcome.margin[rows].tolist()],
                    broken_by=[outcome.broken_by(row) for row in numbers])
    return found if subject.alpha is None else [{**row, "alpha": subject.alpha} for row in found]


def _write(path: Path, subject: Job, data: Dataset, outcome: AttackState, rows: torch.Tensor) -> None:
    if len(rows) == 0:
        return
    path.parent.mkdir(exist_ok=True)
    line = {"subject": str(subject), "index": data.index[rows].tolist(), "passed": outcome.passed[rows].tolist(),
            "predicted": outcome.predicted[rows].tolist(), "margin": outcome.margin[rows].tolist()}
    with path.open("ab") as file:
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path, subject: Job) -> dict[int, tuple[int, int, float]]:
    """By image: stages met, class and margin at the nearest point; a torn line of another process is left out."""
    notes: dict[int, tuple[int, int, float]] = {}
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                told = json.loads(line)
            except json.JSONDecodeError:
                continue
            if told["subject"] != str(subject):
                continue
            for i, *known in zip(told["index"], told["passed"], told["predicted"], told["margin"], strict=True):
                if i not in notes or known[0] > notes[i][0]:
                    notes[i] = (known[0], known[1], known[2])
    return notes
