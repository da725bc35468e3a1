"""Symptoms of every model that was attacked by a list of stages, for `summary.json` and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from equipoise import checks, records, rng
from equipoise.attacks import Fold, black_box, symptoms
from equipoise.data import Dataset, pixels
from equipoise.evaluate.subject import Conditions, Subject
from equipoise.records import Row, Run

IMAGES = 32


def suspicion(
    subjects: Sequence[Subject], data: Dataset, conditions: Conditions, run: Run, rows: Iterable[Row]
) -> list[Row]:
    """One entry per model and symptom: {"model", "attack", "name", "value", "alarm", "says"}.

    Measured once, by one process, on the first images; a finished run is not measured again.
    """
    if not run.world.leads:
        return []
    try:
        known: list[Row] = records.summary(run.folder).get("symptoms", [])
    except checks.InputError:
        known = []
    found = []
    for subject in subjects:
        if not isinstance(subject.run, Fold):
            continue
        mine = [row for row in known if (row["model"], row["attack"]) == (subject.name, subject.attack)]
        found += mine or _measure(subject, subject.run, data, conditions, rows)
    return found


def _measure(subject: Subject, fold: Fold, data: Dataset, conditions: Conditions, rows: Iterable[Row]) -> list[Row]:
    few = data.slice(0, min(IMAGES, len(data)))
    x, y = pixels(few.images.to(conditions.device)), few.labels.to(conditions.device)
    seen = symptoms(subject.model, x, y, threat=conditions.threat, surrogate=fold.surrogate,
                    stream=rng.stream(conditions.seed, "symptoms", few.index.to(conditions.device)))
    mine = [row for row in rows if (row["model"], row["attack"]) == (subject.name, subject.attack)]
    broken = Counter(row["broken_by"] for row in mine if row.get("broken_by"))
    if len({stage.name.startswith("square") for stage in fold.stages}) == 2:  # both kinds were tried
        seen.append(black_box(broken, sum(row["correct"] for row in mine)))
    return [{"model": subject.name, "attack": subject.attack, **symptom.facts()} for symptom in seen]
