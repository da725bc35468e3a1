"""Local Lipschitz estimates of robust models and the margins they leave: estimates, never
certificates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from equipoise import models
from equipoise.certification import estimate_local
from equipoise.certification.radii import lemma_margin
from equipoise.core import device, format, rng, stats
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary
from equipoise.core.rows import LIPSCHITZ, AttackRow, LipschitzRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions
from equipoise.evaluation.measure import measure_batches

ALPHAS = (0.6, 0.7, 0.8, 0.9, 1.0)


def estimate_lipschitz(
    named: Mapping[str, nn.Module],
    data: Dataset,
    conditions: Conditions,
    out: Path | str,
    attacked_rows: Sequence[Row] = (),
) -> list[Result]:
    """Estimate local Lipschitz constants by searching the ball of every image [Bai2024, (C.1)];
    resumable.

    The rows go to a run of their own inside `out`, the folder of the evaluation. Margins of
    `attacked_rows`, of attacks on the same models, are reported beside the estimated ones.

    The results are `lipschitz` (mean over images and classes), `margin` (mean of the smallest
    margin in the ball), `kept@A` (share of images that are classified correctly with a margin that
    no accurate classifier overcomes at alpha A), and `attacked-margin`, `attacked-kept@A` from the
    margins at attacked images.
    """
    start = time.monotonic()
    identity = {
        "command": "estimate",
        "seed": conditions.seed,
        "precision": conditions.precision,
        "models": {name: models.identity(model) for name, model in named.items()},
        "threat": conditions.threat.to_dict(),
        "data": data.describe(),
    }
    run = Run(
        Path(out) / "estimate", identity, conditions.environment(), labels=data.labels_by_index()
    )
    for name, model in named.items():
        _measure(name, model.to(conditions.device), data, conditions, run)
    rows = run.finish()
    results = [result for name in named for result in _results(name, rows, attacked_rows)]
    run.write_summary(
        Summary(command="estimate", seconds=time.monotonic() - start, results=tuple(results))
    )
    return results


def _measure(name: str, model: nn.Module, data: Dataset, conditions: Conditions, run: Run) -> None:
    def compute(batch: Dataset) -> list[LipschitzRow]:
        stream = rng.stream(conditions.seed, LIPSCHITZ, batch.index.to(conditions.device))
        with device.autocast(conditions.precision, conditions.device):
            estimate = estimate_local(
                model,
                pixels(batch.images.to(conditions.device)),
                threat=conditions.threat,
                stream=stream,
            )
        columns = (
            batch.index,
            batch.labels,
            estimate.probabilities.argmax(dim=1),
            estimate.averaged,
            estimate.margins,
        )
        return [
            LipschitzRow(
                index=index,
                model=name,
                attack=LIPSCHITZ,
                label=label,
                predicted=predicted,
                correct=predicted == label,
                lipschitz=round(constant, 6),
                margin=round(margin, 6),
            )
            for index, label, predicted, constant, margin in zip(
                *(c.tolist() for c in columns), strict=True
            )
        ]

    measure_batches(
        run,
        data,
        keys=lambda index: [(index, name, LIPSCHITZ, None)],
        compute=compute,
        batch_size=conditions.batch_size,
        title=f"{name}, {LIPSCHITZ}",
    )


def _results(name: str, rows: Sequence[Row], attacked_rows: Sequence[Row]) -> list[Result]:
    own = [row for row in rows if isinstance(row, LipschitzRow) and row.model == name]
    estimates = {"lipschitz": stats.mean([row.lipschitz for row in own])}
    # A misclassified image has no margin to keep.
    estimates |= _margins("", [row.margin if row.correct else -1.0 for row in own])
    worst: dict[int, float] = {}
    for row in attacked_rows:
        if (
            isinstance(row, AttackRow)
            and row.model == name
            and row.margin is not None
            and row.alpha is None
        ):
            worst[row.index] = min(row.margin, worst.get(row.index, 1.0))
    if worst:
        estimates |= _margins("attacked-", list(worst.values()))
    return [Result.of(name, metric, estimate) for metric, estimate in estimates.items()]


def _margins(prefix: str, margins: list[float]) -> dict[str, stats.Estimate]:
    # A margin of exactly (1 − α)/α is a tie, which the other class may win.
    kept = {
        f"{prefix}kept@{alpha:g}": stats.share(margin > lemma_margin(alpha) for margin in margins)
        for alpha in ALPHAS
    }
    return {f"{prefix}margin": stats.mean(margins), **kept}


def estimate_table(results: Sequence[Result], threat: Threat) -> str:
    """The local Lipschitz constant of every model, and the share of images that a mixture would
    keep per alpha."""
    by_name = {(result.model, result.metric): result for result in results}
    table = format.new_table(
        f"Estimates, not certificates, {threat}",
        "model",
        "constant",
        "alpha",
        "kept",
        "kept at attacked images",
    )
    names, previous = format.short_names(result.model for result in results), ""
    for (model, metric), result in by_name.items():
        if metric.startswith("kept@"):
            attacked = by_name.get((model, f"attacked-{metric}"))
            first = (
                ["", ""]
                if model == previous
                else [names[model], f"{by_name[model, 'lipschitz'].value:.2f}"]
            )
            table.add_row(
                *first,
                metric.removeprefix("kept@"),
                format.percent(result.value),
                format.percent(attacked.value) if attacked else "",
            )
            previous = model
    return format.render(table)
