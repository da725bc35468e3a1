"""The one loop that turns images into rows, with resuming, sharding and progress.

Whatever is measured image by image goes through :func:`measure_batches`, on a fixed grid of batches: a resumed or
sharded run sees every image in the same batch, so that not even rounding differs. A suite of attacks keeps its own
batches full across the data set (:func:`~equipoise.attacks.attack_dataset`); its progress on images that are not
decided yet is logged under `stages/`, so that a killed run repeats at most the stage in progress.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import AttackState, BatchAttack, SearchResult, attack_dataset
from equipoise.core import checks, config, device, files, losses, memory, parallel, progress, rng, serialize
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow, Row, RowKey
from equipoise.core.serialize import Count
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job

STAGES = "stages"
RecordExtra = Callable[[nn.Module, Tensor, Tensor], Mapping[str, Sequence[Any]]]


def measure_batches(run: Run, data: Dataset, *, keys: Callable[[int], Sequence[RowKey]],
                    compute: Callable[[Dataset], Sequence[Row]], batch_size: int, title: str,
                    status: Callable[[], dict[str, object]] | None = None) -> None:
    """Compute the rows of every batch that the run does not have yet; a batch is halved when memory runs out.

    Each process takes every `world.size`-th batch of a grid that `batch_size` fixes. `keys` maps an image index to the
    keys of its expected rows, `compute` images to their rows; `status` is shown beside the progress bar.
    """
    def compute_in_parts(batch: Dataset) -> list[Row]:
        parts = memory.in_batches(lambda rows: compute(batch.take(torch.arange(rows.start, rows.stop))), len(batch),
                                  batch_size)
        return [row for _, part in parts for row in part]

    batches = torch.arange(len(data)).split(batch_size)[run.world.rank :: run.world.size]
    with progress.task(title, total=sum(map(len, batches))) as task:
        for positions in batches:
            batch = data.take(positions)
            if any(key not in run.done for index in batch.index.tolist() for key in keys(index)):
                run.append(compute_in_parts(batch))
            task.advance(len(batch), **(status() if status is not None else {}))


def measure(job: Job, data: Dataset, run: Run, conditions: Conditions, record_extra: RecordExtra | None = None) -> None:
    """Attack every image of `data` that the run has no row for yet.

    `record_extra` computes further columns of the rows from model, attacked images (B, C, H, W) and labels (B,). A
    suite is then run batch by batch, because only then the attacked images of a whole batch are available.
    """
    job.model.to(conditions.device)
    if record_extra is None and not isinstance(job.attack, BatchAttack):
        _measure_suite(job, data, run, conditions)
        return
    correct = total = 0

    def compute(batch: Dataset) -> list[AttackRow]:
        nonlocal correct, total
        rows = _attack_batch(job, batch, conditions, record_extra)
        correct, total = correct + sum(row.correct for row in rows), total + len(rows)
        return rows

    measure_batches(run, data, keys=lambda index: [job.key(index)], compute=compute, title=str(job),
                    batch_size=conditions.batch_size, status=lambda: {"robust": f"{correct}/{total}"})


def _attack_batch(job: Job, batch: Dataset, conditions: Conditions,
                  record_extra: RecordExtra | None) -> list[AttackRow]:
    x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
    stream = rng.stream(conditions.seed, job.attack_name, batch.index.to(conditions.device))
    x_adv = job.attack(job.model, x, y, threat=conditions.threat, stream=stream, precision=conditions.precision)
    # Attacks may be found in reduced precision; success is decided in full precision.
    with inference(job.model), torch.no_grad(), device.full_precision(conditions.device):
        logits = checks.logits(job.model(x_adv), len(x), f"logits of {job.name}").float()
        extra = {} if record_extra is None else record_extra(job.model, x_adv, y)
    checks.labels(y, logits.shape[1])
    predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
    columns = {"label": y.tolist(), "predicted": predicted.tolist(), "correct": (predicted == y).tolist(),
               "margin": [round(value, 6) for value in margin.tolist()], **extra}
    return _attack_rows(job, batch.index.tolist(), columns)


def _attack_rows(job: Job, index: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> list[AttackRow]:
    return [AttackRow(index=image, model=job.name, attack=job.attack_name, alpha=job.alpha,
                      **{name: values[row] for name, values in columns.items()}) for row, image in enumerate(index)]


def _measure_suite(job: Job, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Run the stages of an attack over this process's share of the images; decided images get a row at once."""
    share = data.take(run.world.shard(torch.arange(len(data))))
    missing = [row for row, index in enumerate(share.index.tolist()) if job.key(index) not in run.done]
    log = _StageLog(run.folder / STAGES, run.world.rank, job)
    known = log.read()
    parallel.barrier()  # no process writes before every process has read
    if not missing:
        return
    remaining = share.take(torch.tensor(missing))
    stages = [stage.name for stage in job.attack.stages()]
    state = AttackState.new(stages, len(remaining))
    for row, index in enumerate(remaining.index.tolist()):
        if index in known:
            state.next_stage[row], state.predicted[row], state.margin[row] = known[index]

    def on_result(number: int, result: SearchResult, current: AttackState) -> None:
        decided = result.broken.cpu() | (number == len(stages))
        run.append(_decided_rows(job, remaining, current, result.rows[decided]))
        if number:  # number 0 is the clean image
            log.write(remaining, current, result.rows[~decided])

    final = attack_dataset(job.attack, job.model, remaining, threat=conditions.threat, seed=conditions.seed,
                           precision=conditions.precision, batch_size=conditions.batch_size, device=conditions.device,
                           whole=data, state=state, on_result=on_result, title=str(job))
    undecided = [row for row, index in enumerate(remaining.index.tolist()) if job.key(index) not in run.done]
    run.append(_decided_rows(job, remaining, final, torch.tensor(undecided, dtype=torch.int64)))


def _decided_rows(job: Job, data: Dataset, state: AttackState, rows: Tensor) -> list[AttackRow]:
    images, positions = data.take(rows), rows.tolist()
    columns = {"label": images.labels.tolist(), "predicted": state.predicted[rows].tolist(),
               "correct": [bool(state.survived[row]) for row in positions],
               "margin": [round(value, 6) for value in state.margin[rows].tolist()],
               "broken_by": [state.broken_by(row) for row in positions]}
    return _attack_rows(job, images.index.tolist(), columns)


@dataclass(frozen=True)
class _StageEntry:
    """One line of a stage log."""

    job: tuple[Any, ...]
    index: tuple[Count, ...]
    next_stage: tuple[Count, ...]
    predicted: tuple[Count, ...]
    margin: tuple[float, ...]


class _StageLog:
    """What the finished stages found about images that are not decided yet, one file per process."""

    def __init__(self, folder: Path, rank: int, job: Job) -> None:
        self.folder, self.path, self.job = folder, folder / f"{rank}.jsonl", [job.name, job.attack_name, job.alpha]
        self.stages = len(job.attack.stages())
        if self.path.exists():
            files.remove_incomplete_line(self.path)

    def write(self, data: Dataset, state: AttackState, rows: Tensor) -> None:
        if len(rows):
            entry = {"job": self.job, "index": data.index[rows].tolist(), "next_stage": state.next_stage[rows].tolist(),
                     "predicted": state.predicted[rows].tolist(), "margin": state.margin[rows].tolist()}
            files.append_durably(self.path, json.dumps(entry) + "\n")

    def read(self) -> dict[int, tuple[int, int, float]]:
        """By image: the next stage, predicted class and margin; an incomplete line of another process is skipped."""
        known: dict[int, tuple[int, int, float]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = config.read_text(path).splitlines(keepends=True)
            for number, line in enumerate(lines, start=1):
                if number == len(lines) and not line.endswith("\n"):
                    continue
                where = f"{path}, line {number},"
                entry = serialize.from_plain(_StageEntry, config.parse_json(line, where), where)
                if list(entry.job) != self.job:
                    continue
                columns = (entry.next_stage, entry.predicted, entry.margin)
                checks.require({len(column) for column in columns} == {len(entry.index)} and max(
                    entry.next_stage, default=0) <= self.stages, where, f"be about the {self.stages} stages", line)
                for index, *values in zip(entry.index, *columns, strict=True):
                    if index not in known or values[0] > known[index][0]:
                        known[index] = (int(values[0]), int(values[1]), values[2])
        return known


def remove_stage_logs(run: Run) -> None:
    """Remove the logs of unfinished stages from a finished run."""
    if run.world.is_leader and (run.folder / STAGES).exists():
        shutil.rmtree(run.folder / STAGES)
