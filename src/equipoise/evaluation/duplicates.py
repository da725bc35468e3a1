"""Jobs that would measure the same thing under two names: they are measured once, and their rows
are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from equipoise.attacks import BatchAttack
from equipoise.core import parallel
from equipoise.core.records import Run
from equipoise.evaluation.job import Job

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def find_duplicates(jobs: Sequence[Job]) -> dict[str, Job]:
    """The jobs that repeat an earlier one, by their text: same weights, same code, same attack and
    audit."""
    first: list[Job] = []
    duplicates: dict[str, Job] = {}
    for job in jobs:
        original = next((other for other in first if _is_repeated(job, other)), None)
        if original is None:
            first.append(job)
        else:
            duplicates[str(job)] = original
    return duplicates


def copy_rows(job: Job, original: Job, run: Run) -> None:
    """Write the rows of the original job under the names of `job`; one process does it for all."""
    parallel.barrier()
    if run.world.is_leader:
        run.append(
            replace(row, model=job.name, attack=job.attack_name, alpha=job.alpha)
            for row in run.read_rows()
            if row.key == original.key(row.index)
        )
    parallel.barrier()


def _is_repeated(job: Job, other: Job) -> bool:
    # An attack on one batch draws its random numbers by the name of the job.
    same_name = job.attack_name == other.attack_name or not isinstance(job.attack, BatchAttack)
    return (
        same_name
        and job.attack == other.attack
        and job.audit == other.audit
        and is_same_model(job.model, other.model)
    )


def is_same_model(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same classes, weights, buffers and plain attributes, and no
    hooks.

    Attributes that cannot be compared, such as functions, must be the same object.
    """
    if model is other:
        return True
    ours, theirs = dict(model.named_modules()), dict(other.named_modules())
    return ours.keys() == theirs.keys() and all(
        _is_same_module(ours[name], theirs[name]) for name in ours
    )


def _is_same_module(module: nn.Module, other: nn.Module) -> bool:
    if type(module) is not type(other):
        return False
    ours, theirs = (
        {key: value for key, value in vars(each).items() if key not in ("_modules", "training")}
        for each in (module, other)
    )
    return ours.keys() == theirs.keys() and all(
        _is_same_value(ours[key], theirs[key]) for key in ours
    )


def _is_same_value(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return (
            value.dtype == other.dtype
            and value.shape == other.shape
            and torch.equal(value, other.to(value.device))
        )
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        return len(value) == len(other) and all(map(_is_same_value, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _is_same_value(value[key], other[key]) for key in value
        )
    if isinstance(value, set | frozenset):
        return bool(value == other)
    return isinstance(value, _PLAIN) and bool(value == other)
