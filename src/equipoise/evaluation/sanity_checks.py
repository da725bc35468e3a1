"""Symptoms of every model that was attacked, for `summary.json` and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from equipoise.attacks import SanityCheck, Suite, black_box, run_sanity_checks
from equipoise.core import checks, memory, records, rng
from equipoise.core.records import Row, Run
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Attack, Conditions, Job, untouched

IMAGES = 32


def suspicion(
    subjects: Sequence[Job], data: Dataset, conditions: Conditions, run: Run, rows: Iterable[Row]
) -> list[Row]:
    """One entry per model and symptom: {"model", "attack", "name", "value", "alarm", "says"}.

    Measured once, by one process, on the first images; a finished run is not measured again. A mixture at one
    alpha of several is left out: a sweep chooses and claims nothing.
    """
    if not run.world.leads:
        return []
    try:
        known: list[Row] = records.summary(run.folder).get("symptoms", [])
    except checks.InputError:
        known = []
    found = []
    for subject in subjects:
        if subject.run is not untouched and subject.alpha is None:
            mine = [row for row in known if _about(row, subject)]
            found += mine or _measure(subject, data, conditions, rows)
    return found


def _about(row: Row, subject: Job) -> bool:
    return (row["model"], row["attack"]) == (subject.name, subject.attack)


def _measure(subject: Job, data: Dataset, conditions: Conditions, rows: Iterable[Row]) -> list[Row]:
    few = data.slice(0, min(IMAGES, len(data)))

    def look(part: slice) -> list[SanityCheck]:
        some = few.take(torch.arange(part.start, part.stop))
        x, y = pixels(some.images.to(conditions.device)), some.labels.to(conditions.device)
        return run_sanity_checks(subject.model, x, y, threat=conditions.threat, surrogate=_source(subject.run),
                        stream=rng.stream(conditions.seed, "symptoms", some.index.to(conditions.device)))

    # As many as fit at once: what came first is told.
    _, seen = next(memory.in_batches(look, len(few), IMAGES))
    if isinstance(subject.run, Suite) and len({_blind(stage.name) for stage in subject.run.stages}) == 2:
        # Both kinds were tried, so they can be compared.
        mine = [row for row in rows if _about(row, subject)]
        broken = Counter(row["broken_by"] for row in mine if row.get("broken_by"))
        seen.append(black_box(broken, sum(row["correct"] for row in mine)))
    return [{"model": subject.name, "attack": subject.attack, **symptom.facts()} for symptom in seen]


def _source(attack: Attack) -> nn.Module | None:
    """Where an attack takes its gradients, if not from the model itself."""
    if isinstance(attack, Suite):
        return attack.surrogate
    bound = attack.keywords.get("surrogate") if isinstance(attack, partial) else None
    return bound if isinstance(bound, nn.Module) else None


def _blind(stage: str) -> bool:
    return stage.startswith("square")
