"""The one loop that turns images into rows, with resuming, sharding and progress.

Whatever is measured image by image goes through :func:`measure_batches`, on a fixed grid of
batches: a resumed or sharded run sees every image in the same batch, so that not even rounding
differs. A suite of attacks keeps its own batches full across the data set
(:func:`~equipoise.attacks.attack_dataset`); its progress on images that are not decided yet is
logged under `stages/`, so that a killed run repeats at most the stage in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import (
    Attack,
    AttackState,
    BatchAttack,
    Clean,
    SearchResult,
    attack_dataset,
    judge_with_new_passes,
    radii_of,
)
from equipoise.core import checks, device, memory, parallel, progress, rng
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.rows import AUDIT, AttackRow, Row, RowKey
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job
from equipoise.evaluation.stage_log import STAGES, StageLog

BYTES_BLOCK = 16  # images per pass that are judged after rounding to bytes
KeepImages = Callable[[Job, Sequence[int], Tensor], None]  # job, indices and attacked images
# The same, margins of probabilities (B,), and what the observed part of the model returned, if it
# is known.
RecordPoints = Callable[[Job, Sequence[int], Tensor, Tensor, Tensor | None], None]
Observe = Callable[
    [Job], nn.Module | None
]  # the part of the job's model whose outputs are recorded
NOTHING: Callable[..., None] = lambda *_: None  # noqa: E731


def measure_batches(
    run: Run,
    data: Dataset,
    *,
    keys: Callable[[int], Sequence[RowKey]],
    compute: Callable[[Dataset], Sequence[Row]],
    batch_size: int,
    title: str,
    status: Callable[[], dict[str, object]] | None = None,
) -> None:
    """Compute the rows of every batch that the run does not have yet; a batch is halved when memory
    runs out.

    Each process takes every `world.size`-th batch of a grid that `batch_size` fixes. `keys` maps an
    image index to the keys of its expected rows, `compute` images to their rows; `status` is shown
    beside the progress bar.
    """

    def compute_in_parts(batch: Dataset) -> list[Row]:
        parts = memory.in_batches(
            lambda rows: compute(batch.take(torch.arange(rows.start, rows.stop))),
            len(batch),
            batch_size,
        )
        return [row for _, part in parts for row in part]

    batches = torch.arange(len(data)).split(batch_size)[run.world.rank :: run.world.size]
    with progress.stage(title, total=sum(map(len, batches))) as stage:
        for positions in batches:
            batch = data.take(positions)
            if any(key not in run.done for index in batch.index.tolist() for key in keys(index)):
                run.append(compute_in_parts(batch))
            stage.advance(len(batch), **(status() if status is not None else {}))


def measure(
    job: Job,
    data: Dataset,
    run: Run,
    conditions: Conditions,
    keep: KeepImages = NOTHING,
    record: RecordPoints = NOTHING,
    observe: Observe = NOTHING,
) -> float | None:
    """Attack every image of `data` that the run has no row for yet.

    An attack on a randomised model is run batch by batch, because its random numbers are those of a
    batch. `keep` gets attacked images with their indices before their rows are written: all,
    or those that a suite breaks. `record` also gets the nearest points of the images that a stage
    did not break, before the stage is logged, with the outputs of what `observe` names.

    Returns:
        The seconds of the audit; None where an earlier start of the run has audited, too.
    """
    job.model.to(conditions.device)
    if not isinstance(job.attack, BatchAttack) and job.attack.repeats is None:
        return _measure_suite(job, data, run, conditions, keep, record, observe(job))
    correct = total = 0

    def compute(batch: Dataset) -> list[AttackRow]:
        nonlocal correct, total
        rows = _attack_batch(job, batch, conditions, keep, record)
        correct, total = correct + sum(row.correct for row in rows), total + len(rows)
        return rows

    measure_batches(
        run,
        data,
        keys=lambda index: [job.key(index)],
        compute=compute,
        title=str(job),
        batch_size=conditions.batch_size,
        status=lambda: {"robust": f"{correct}/{total}"} if total else {},
    )
    return 0.0


def _attack_batch(
    job: Job,
    batch: Dataset,
    conditions: Conditions,
    keep: KeepImages,
    record: RecordPoints,
) -> list[AttackRow]:
    x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
    stream = rng.stream(conditions.seed, job.attack_name, batch.index.to(conditions.device))
    x_adv = job.attack(
        job.model, x, y, threat=conditions.threat, stream=stream, precision=conditions.precision
    )

    def logits() -> Tensor:
        z = checks.logits(job.model(x_adv.contiguous()), len(x), f"logits of {job.name}").float()
        checks.labels(y, z.shape[1])
        return z

    # Attacks may be found in reduced precision; success is decided in full precision.
    with inference(job.model), torch.no_grad(), device.full_precision(conditions.device):
        verdict = judge_with_new_passes(logits, y, stream, job.attack.repeats)
    keep(job, batch.index.tolist(), x_adv)
    record(job, batch.index.tolist(), x_adv, verdict.margin, None)
    columns: dict[str, Sequence[Any]] = {
        "label": y.tolist(),
        "predicted": verdict.predicted.tolist(),
        "correct": (verdict.predicted == y).tolist(),
        "margin": [round(value, 6) for value in verdict.margin.tolist()],
    }
    if job.attack.repeats is not None:
        columns |= {
            "share_correct": verdict.share_correct.tolist(),
            "passes": [job.attack.repeats] * len(y),
        }
    elif not isinstance(
        job.attack, Clean
    ):  # one pass over rounded images is no verdict on a randomised model
        columns["broken_as_bytes"] = _broken_as_bytes(
            job, x_adv, y, verdict.predicted != y, conditions.device
        )
    columns |= _radius_columns(job, x_adv, x, verdict.predicted != y, conditions)
    return _attack_rows(job, batch.index.tolist(), columns)


def _broken_as_bytes(
    job: Job, x_adv: Tensor, y: Tensor, broken: Tensor, place: torch.device
) -> list[bool | None]:
    """Of the broken images: whether they are still misclassified after rounding to multiples of
    1/255.

    Batches have one size, so that the answer does not depend on which images are broken together.
    """
    answers: list[bool | None] = [None] * len(broken)
    rows = broken.nonzero().squeeze(1)
    if len(rows) == 0:
        return answers

    def judge(own: Tensor) -> Tensor:
        rounded = ((x_adv[own] * 255).round() / 255).contiguous()
        still: Tensor = job.model(rounded).argmax(dim=1) != y[own]
        return still

    with inference(job.model), torch.no_grad(), device.full_precision(place):
        judged = memory.in_blocks(judge, rows, BYTES_BLOCK, BYTES_BLOCK)
    for row, still in zip(rows.tolist(), judged.tolist(), strict=True):
        answers[row] = still
    return answers


def _radius_columns(
    job: Job, x_adv: Tensor, x: Tensor, broken: Tensor, conditions: Conditions
) -> dict[str, Sequence[Any]]:
    """For an attack that looks for the smallest perturbations: their norms, and the largest that it
    allows."""
    if not job.attack.measures_radius:
        return {}
    return {
        "radius": radii_of(x_adv, x, broken.tolist(), conditions.threat.norm),
        "max_radius": [conditions.threat.eps] * len(x),
    }


def _attack_rows(
    job: Job, index: Sequence[int], columns: Mapping[str, Sequence[Any]]
) -> list[AttackRow]:
    return [
        AttackRow(
            index=image,
            model=job.name,
            attack=job.attack_name,
            alpha=job.alpha,
            **{name: values[row] for name, values in columns.items()},
        )
        for row, image in enumerate(index)
    ]


def _measure_suite(
    job: Job,
    data: Dataset,
    run: Run,
    conditions: Conditions,
    keep: KeepImages,
    record: RecordPoints,
    observe: nn.Module | None,
) -> float | None:
    """Run the stages of an attack over this process's share of the images; decided images get a row
    at once.

    With an audit a survivor is not decided before it: the sample is one of the survivors of all
    processes.
    """
    share = data.take(run.world.shard(torch.arange(len(data))))
    missing = share.take(
        torch.tensor(
            [
                row
                for row, index in enumerate(share.index.tolist())
                if job.key(index) not in run.done
            ],
            dtype=torch.int64,
        )
    )
    log = StageLog(run.folder / STAGES, run.world.rank, job, job.attack)
    audit_log = (
        None
        if job.audit is None
        else StageLog(run.folder / STAGES, run.world.rank, job, job.audit.attack, "audit")
    )
    is_resumed = audit_log is not None and (
        bool(audit_log.known) or any(row.audit_passes is not None for row in _rows(job, run))
    )
    parallel.barrier()  # no process writes before every process has read
    final = _run_stages(job, job.attack, missing, data, run, conditions, log, keep, record, observe)
    if audit_log is None:
        run.append(_decided_rows(job, missing, final, torch.arange(len(missing))))
        return 0.0
    held = final.survived.nonzero().squeeze(1)
    survivors = _gather_survivors(missing.index[held], final.margin[held], final.predicted[held])
    sample, start = _sample_survivors(job, survivors, run, conditions.seed), time.monotonic()
    run.append(_decided_rows(job, missing, final, held[~torch.isin(missing.index[held], sample)]))
    _audit(
        job,
        data.take(torch.isin(data.index, sample)),
        survivors,
        run,
        conditions,
        audit_log,
        keep,
        record,
        observe,
    )
    seconds = max(parallel.gather(time.monotonic() - start))
    return None if is_resumed else seconds


def _audit(
    job: Job,
    sample: Dataset,
    survivors: Mapping[int, tuple[float, int]],
    run: Run,
    conditions: Conditions,
    log: StageLog,
    keep: KeepImages,
    record: RecordPoints,
    observe: nn.Module | None,
) -> None:
    """Run the stronger attack on the images of the sample that have no row, and write their rows.

    They are divided anew: as one of the survivors of every process, their parts would differ in
    size.
    """
    assert job.audit is not None
    is_missing = torch.tensor(
        [index in survivors for index in sample.index.tolist()], dtype=torch.bool
    )
    own = sample.take(run.world.shard(is_missing.nonzero().squeeze(1)))
    before = AttackState.new([stage.name for stage in job.audit.attack.stages()], len(own))
    for row, index in enumerate(own.index.tolist()):
        before.margin[row], before.predicted[row] = survivors[index]
    audited = _run_stages(
        job, job.audit.attack, own, sample, run, conditions, log, keep, record, observe, before
    )
    run.append(_decided_rows(job, own, audited, torch.arange(len(own)), is_audit=True))


def _rows(job: Job, run: Run) -> list[AttackRow]:
    """The rows of a job that the run has."""
    if not any(key[1:] == job.key(0)[1:] for key in run.done):
        return []
    return [
        row
        for row in run.read_rows()
        if isinstance(row, AttackRow) and row.key == job.key(row.index)
    ]


def _gather_survivors(
    index: Tensor, margin: Tensor, predicted: Tensor
) -> dict[int, tuple[float, int]]:
    """By image of any process that survived the attack: its margin and class so far."""
    own = list(zip(index.tolist(), margin.tolist(), predicted.tolist(), strict=True))
    return {image: (least, label) for part in parallel.gather(own) for image, least, label in part}


def _sample_survivors(job: Job, survivors: Collection[int], run: Run, seed: int) -> Tensor:
    """The numbers of the images to audit, from the survivors of all processes and those that
    already have a row."""
    assert job.audit is not None
    with_row = {row.index for row in _rows(job, run) if row.correct or row.audit_passes is not None}
    return torch.tensor(job.audit.sample(with_row.union(survivors), seed), dtype=torch.int64)


def _run_stages(
    job: Job,
    attack: Attack,
    images: Dataset,
    whole: Dataset,
    run: Run,
    conditions: Conditions,
    log: StageLog,
    keep: KeepImages,
    record: RecordPoints,
    observe: nn.Module | None,
    state: AttackState | None = None,
) -> AttackState:
    """Run `attack` on images, from where the log ends; images that it breaks get a row, the others
    a line of the log.

    `state` is what is known about the images from other attacks, which an audit has and the attack
    of a job has not.
    """
    is_audit, stages = state is not None, [stage.name for stage in attack.stages()]
    state = AttackState.new(stages, len(images)) if state is None else state
    for row, index in enumerate(images.index.tolist()):
        for name, value in log.known.get(index, {}).items():
            getattr(state, name)[row] = value
    if len(images) == 0:
        return state

    def on_result(number: int, result: SearchResult, current: AttackState) -> None:
        broken = result.broken.cpu()
        decided = (
            broken if job.audit is not None and not is_audit else broken | (number == len(stages))
        )
        columns: dict[str, Sequence[Any]] = {"broken_as_bytes": [None] * len(broken)}
        if number:
            record(
                job,
                images.index[result.rows].tolist(),
                result.images,
                result.margin,
                result.observed,
            )
        if number and bool(broken.any()):
            keep(job, images.index[result.rows[broken]].tolist(), result.images[result.broken])
            labels = images.labels[result.rows].to(conditions.device)
            columns["broken_as_bytes"] = _broken_as_bytes(
                job, result.images, labels, result.broken, conditions.device
            )
        if job.attack.measures_radius:
            clean = pixels(images.images[result.rows].to(conditions.device))
            columns |= _radius_columns(job, result.images, clean, broken, conditions)
        chosen = decided.nonzero().squeeze(1).tolist()
        run.append(
            _decided_rows(
                job,
                images,
                current,
                result.rows[decided],
                is_audit=is_audit,
                columns={name: [values[row] for row in chosen] for name, values in columns.items()},
            )
        )
        if number:  # number 0 is the clean image
            log.write(images, current, result.rows[~decided])

    return attack_dataset(
        attack,
        job.model,
        images,
        threat=conditions.threat,
        seed=conditions.seed,
        precision=conditions.precision,
        batch_size=conditions.batch_size,
        device=conditions.device,
        whole=whole,
        state=state,
        on_result=on_result,
        observe=observe,
        title=f"{job}, audit" if is_audit else str(job),
    )


def _decided_rows(
    job: Job,
    data: Dataset,
    state: AttackState,
    rows: Tensor,
    *,
    is_audit: bool = False,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> list[AttackRow]:
    images, positions = data.take(rows), rows.tolist()
    broken_by = [state.broken_by(row) for row in positions]
    values: dict[str, Sequence[Any]] = {
        "label": images.labels.tolist(),
        "predicted": state.predicted[rows].tolist(),
        "correct": [bool(state.survived[row]) for row in positions],
        "margin": [round(value, 6) for value in state.margin[rows].tolist()],
        "broken_by": [f"{AUDIT}{stage}" if is_audit and stage else stage for stage in broken_by],
        **(columns or {}),
    }
    values["audit_passes" if is_audit else "attack_passes"] = [
        round(value) for value in state.passes[rows].tolist()
    ]
    return _attack_rows(job, images.index.tolist(), values)
