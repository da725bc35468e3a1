"""An evaluation from start to end: data × models → rows → results."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import __version__, models
from equipoise.core import checks, summary
from equipoise.core.records import Row, Run
from equipoise.data import Dataset, pixels
from equipoise.evaluation.attacked import attacked
from equipoise.evaluation.job import Attack, Conditions, Job, described, untouched
from equipoise.evaluation.sanity_checks import suspicion
from equipoise.evaluation.staged import forget


def evaluate(
    named: Mapping[str, nn.Module],
    data: Dataset,
    *,
    attacks: Mapping[str, Attack],
    conditions: Conditions,
    out: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Clean and attacked accuracy of every model on the same images.

    Args:
        named: models by the name they get in the rows.
        data: the images; never those a model or mixture was tuned on.
        attacks: by name; settings are bound with :func:`functools.partial`.
        conditions: threat, seed, batch size, device, precision.
        out: run folder; a folder that holds a part of this very run is resumed. Without it nothing is kept.
        settings: further facts for `run.toml`, such as the command; they do not make it another run.

    Returns:
        One result per model and metric, as in `summary.json`: `clean`, every attack, and `worst`.
    """
    checks.require(len(named) > 0, "models", "name at least one model", [])
    for name in ("clean", "worst"):
        checks.require(name not in attacks, "attacks", f"not use the name {name}, which is a metric", sorted(attacks))
    subjects = [Job(name, model, attack, function) for name, model in named.items()
                for attack, function in {"clean": untouched, **attacks}.items()]
    if out is not None:
        return judge(subjects, data, conditions, begin(out, subjects, data, conditions, settings))
    with tempfile.TemporaryDirectory() as folder:
        return judge(subjects, data, conditions, begin(folder, subjects, data, conditions, settings))


def begin(
    out: Path | str,
    subjects: Sequence[Job],
    data: Dataset,
    conditions: Conditions,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Open the run folder of this very evaluation, new or to be resumed; models that cannot work leave none."""
    checks.require(len(data.index.unique()) == len(data), "images", "have an index each", f"{len(data)} images with "
                   f"{len(data.index.unique())} different ones")
    for name, model in {subject.name: subject.model for subject in subjects}.items():
        usable(name, model.to(conditions.device), data, conditions.device)
    return Run(out, identity(subjects, data, conditions), {**facts(conditions), **(settings or {})})


def usable(name: str, model: nn.Module, data: Dataset, device: torch.device) -> None:
    """One image through the model, so that a model of another kind is one sentence now and not a trace later."""
    told = models.probe(name, model, pixels(data.images[:1].to(device)))
    logits = checks.logits(told, 1, name=f"logits of {name}")
    checks.require(logits.shape[1] == data.num_classes, name,
                   f"have as many classes as {data.name}, {data.num_classes}", logits.shape[1])


def judge(
    subjects: Sequence[Job],
    data: Dataset,
    conditions: Conditions,
    run: Run,
    pairs: Sequence[tuple[str, str]] = (),
    told: Mapping[str, Any] | None = None,
    *,
    verb: str = "evaluate",
    begun: float | None = None,
) -> list[Row]:
    """Like :func:`evaluate`, with an attack list of its own for every model; `pairs` are compared image by image.

    `told` are further facts for `summary.json`. A longer story of which this is the end gives its `verb`, and when
    it has `begun` (:func:`time.monotonic`).
    """
    start = time.monotonic() if begun is None else begun
    for subject in subjects:
        subject.model.to(conditions.device)
        attacked(subject, data, run, conditions)
    rows = run.finish()
    forget(run)
    results = summary.results(rows, conditions.threat)
    differences = summary.differences(rows, pairs, conditions.threat)
    more: dict[str, Any] = {"differences": differences} if differences else {}
    if seen := suspicion(subjects, data, conditions, run, rows):
        more["symptoms"] = seen
    run.summarise(verb, time.monotonic() - start, results, **more, **(told or {}))
    return results


def identity(subjects: Sequence[Job], data: Dataset, conditions: Conditions) -> dict[str, Any]:
    """What makes two runs the same run: models, images, threat, attacks, seed and precision."""
    digests = {subject.name if subject.alpha is None else f"{subject.name}@{subject.alpha:g}":
               models.model_identity(subject.model) for subject in subjects}
    return {
        "verb": "evaluate",
        "seed": conditions.seed,
        "precision": conditions.precision,
        "data": data.facts(),
        "threat": conditions.threat.facts(),
        "models": digests,
        "attacks": {str(subject): described(subject.run) for subject in subjects},
    }


def facts(conditions: Conditions) -> dict[str, Any]:
    """What may differ between two sittings of the same run."""
    return {
        "batch_size": conditions.batch_size,
        "device": str(conditions.device),
        "equipoise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
