"""One model under a list of attacks, of which only the worst case is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from equipoise.core.aggregation import CLEAN
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job, measure
from equipoise.evaluation.adaptive import KINDS
from equipoise.evaluation.job import open_run
from equipoise.evaluation.stage_log import remove_stage_logs

ADAPTIVE = tuple(KINDS.values())  # names of adaptive attacks in rows begin so
ATTACKED = "attacked"  # name in rows of the worst case over the list


def folder_name(name: str) -> str:
    """A model's name as that of a folder.

    >>> folder_name("gate on the NUTS map (ours) (seed 1)")
    'gate-on-the-NUTS-map-ours-seed-1'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-.") or "model"


def measure_list(
    jobs: Sequence[Job], data: Dataset, folder: Path, conditions: Conditions
) -> list[AttackRow]:
    """Rows of one model: clean, and in the worst case over its attacks, in the order of
    :func:`adaptive_first`.

    An image that one attack breaks is not attacked by the next. The rows of each attack are in the
    folder, which is resumed.
    """
    run = open_run(folder, jobs, data, conditions)
    clean, *attacks = jobs
    return _measure_in_order(clean, adaptive_first(attacks), data, run, conditions)


def _measure_in_order(
    clean: Job, attacks: Sequence[Job], data: Dataset, run: Run, conditions: Conditions
) -> list[AttackRow]:
    measure(clean, data, run, conditions)
    left, worst = data, dict[int, AttackRow]()
    for job in attacks:
        if len(left):
            measure(job, left, run, conditions)
        for row in run.read_rows():
            if (
                isinstance(row, AttackRow)
                and row.attack == job.attack_name
                and _is_worse(row, worst.get(row.index))
            ):
                worst[row.index] = replace(
                    row,
                    attack=ATTACKED,
                    broken_by=None
                    if row.correct
                    else (
                        row.broken_by
                        if row.broken_by == CLEAN
                        else f"{job.attack_name}/{row.broken_by or ''}".strip("/")
                    ),
                )
        left = data.take(torch.tensor([worst[index].correct for index in data.index.tolist()]))
    rows = run.finish()
    remove_stage_logs(run)
    return [row for row in rows if isinstance(row, AttackRow) and row.attack == CLEAN] + list(
        worst.values()
    )


def adaptive_first(jobs: Sequence[Job]) -> list[Job]:
    """The attacks in their given order, but adaptive ones first, and before those the ones that
    also lower alpha.

    Where there are adaptive attacks, they break most images.
    """
    return sorted(
        jobs, key=lambda job: (not job.attack_name.startswith(ADAPTIVE), job.attack.extra is None)
    )


def _is_worse(row: AttackRow, other: AttackRow | None) -> bool:
    if other is None or row.correct != other.correct:
        return other is None or not row.correct
    return row.margin is not None and other.margin is not None and row.margin < other.margin
