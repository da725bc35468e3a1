"""Sanity checks of every attacked model, for `summary.json` and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from equipoise.attacks import Clean, black_box_check, run_sanity_checks
from equipoise.core import memory, parallel, progress, rng
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.results import SanityCheck, read_summary
from equipoise.core.rows import AttackRow, Row
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job
from equipoise.evaluation.random_search import is_random_search

IMAGES = 32


def _is_checked(job: Job) -> bool:
    return not isinstance(job.attack, Clean) and job.alpha is None


def check_jobs(
    jobs: Sequence[Job],
    data: Dataset,
    conditions: Conditions,
    run: Run,
    rows: Sequence[Row],
) -> list[SanityCheck]:
    """The sanity checks of every attacked model, in every process.

    They are measured once, on the first images, and divided among the processes by model; a
    finished run keeps those it has. A mixture at one alpha of several is skipped: a sweep makes no
    claim about robustness.
    """
    try:
        known = read_summary(run.folder).sanity_checks
    except InputError:
        known = ()
    checked = [job for job in jobs if _is_checked(job)]
    has_checks = {(check.model, check.attack) for check in known}
    missing = [job for job in checked if (job.name, job.attack_name) not in has_checks]
    own = missing[run.world.rank :: run.world.size]
    measured: list[SanityCheck] = []
    with progress.stage("sanity checks", total=len(own)) as stage:
        for job in own:
            measured += _measure(job, data, conditions, rows)
            stage.advance(1)
    checks = [*known, *chain.from_iterable(parallel.gather(measured))]
    return [
        check
        for job in checked
        for check in checks
        if (check.model, check.attack) == (job.name, job.attack_name)
    ]


def _measure(
    job: Job, data: Dataset, conditions: Conditions, rows: Sequence[Row]
) -> list[SanityCheck]:
    first = data.slice(0, min(IMAGES, len(data)))

    def check(part: slice) -> list[SanityCheck]:
        images = first.take(torch.arange(part.start, part.stop))
        x, y = pixels(images.images.to(conditions.device)), images.labels.to(conditions.device)
        return run_sanity_checks(
            job.model,
            x,
            y,
            threat=conditions.threat,
            surrogate=job.attack.surrogate,
            eot=job.attack.eot,
            repeats=job.attack.repeats,
            stream=rng.stream(conditions.seed, "symptoms", images.index.to(conditions.device)),
        )

    # As many images as fit into memory at once
    _, checks = next(memory.in_batches(check, len(first), IMAGES))
    # A suite of attacks with and without gradients
    if len({stage.name.startswith("square") for stage in job.attack.stages()}) == 2:
        own = [
            row
            for row in rows
            if isinstance(row, AttackRow) and (row.model, row.attack) == (job.name, job.attack_name)
        ]
        broken = Counter(row.broken_by for row in own if row.broken_by)
        checks.append(black_box_check(broken, sum(row.correct for row in own)))
    if is_random_search(job):  # known, and a note says so
        checks = [check for check in checks if check.name != "vanishing gradients"]
    return [replace(check, model=job.name, attack=job.attack_name) for check in checks]
