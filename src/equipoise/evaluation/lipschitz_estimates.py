"""Local Lipschitz estimates of robust models and the margins they leave: estimates, never certificates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from equipoise.certification import estimate_local
from equipoise.certification.lipschitz import margin_statistics
from equipoise.core import device, memory, progress, rng, stats
from equipoise.core.records import Row, Run, rows_of
from equipoise.data import Dataset, pixels
from equipoise.evaluation.evaluation import facts
from equipoise.evaluation.job import Conditions
from equipoise.models import model_identity

FOLDER = "estimate"  # of this run, inside the folder of the evaluation
ATTACK = "local-lipschitz"  # in the place where other rows name their attack
ALPHAS = (0.6, 0.7, 0.8, 0.9, 1.0)


def estimated(
    named: Mapping[str, nn.Module], data: Dataset, conditions: Conditions, out: Path | str, attacked: Sequence[Row] = ()
) -> list[Row]:
    """Largest changes of every class probability that a search of the ball meets [Bai2024, (C.1)]; resumable.

    Args:
        named: robust models by the name they get in the rows.
        data: the images.
        conditions: threat, seed, batch size, device, precision.
        out: folder of the evaluation; the rows go to a run of their own inside it.
        attacked: rows of attacks on the same models, whose margins are told beside the estimated ones.

    Returns:
        Results: `lipschitz` (mean over images and classes), `margin` (mean of the least margin in the ball),
        `kept@A` (share of images that are right and whose margin no accurate classifier overcomes at alpha A),
        and `attacked-margin`, `attacked-kept@A` from the margins at attacked images.
    """
    start = time.monotonic()
    identity = {"verb": "estimate", "seed": conditions.seed, "precision": conditions.precision,
                "models": {name: model_identity(model) for name, model in named.items()},
                "threat": conditions.threat.facts(),
                "data": data.facts()}
    run = Run(Path(out) / FOLDER, identity, facts(conditions))
    for name, model in named.items():
        parts = torch.arange(len(data)).split(conditions.batch_size)[run.world.rank :: run.world.size]
        with progress.task(f"{name}, {ATTACK}", total=sum(map(len, parts))) as task:
            for part in parts:
                batch = data.take(part)
                if any((i, name, ATTACK, None) not in run.done for i in batch.index.tolist()):
                    run.append(_rows(name, model.to(conditions.device), batch, conditions))
                task.advance(len(part))
    rows = run.finish()
    results = [result for name in named for result in _results(name, rows, attacked)]
    run.summarise("estimate", time.monotonic() - start, results)
    return results


def _rows(name: str, model: nn.Module, batch: Dataset, conditions: Conditions) -> list[Row]:
    def work(rows: slice) -> list[Row]:
        some = batch.take(torch.arange(rows.start, rows.stop))
        chance = rng.stream(conditions.seed, ATTACK, some.index.to(conditions.device))
        with device.precision(conditions.precision, conditions.device):
            found = estimate_local(model, pixels(some.images.to(conditions.device)), threat=conditions.threat,
                                   stream=chance)
        predicted = found.probabilities.argmax(dim=1).cpu()
        return rows_of(some.index.tolist(), model=name, attack=ATTACK, label=some.labels.tolist(),
                       predicted=predicted.tolist(), correct=(predicted == some.labels).tolist(),
                       lipschitz=[round(value, 6) for value in found.averaged.tolist()],
                       margin=[round(value, 6) for value in found.margins.tolist()])

    return [row for _, part in memory.in_batches(work, len(batch), conditions.batch_size) for row in part]


def _results(name: str, rows: Sequence[Row], attacked: Sequence[Row]) -> list[Row]:
    own = [row for row in rows if row["model"] == name]
    told = {"lipschitz": stats.mean([row["lipschitz"] for row in own])}
    # Where the model is wrong to begin with, there is no lead to keep.
    told |= _margins("", [row["margin"] if row["correct"] else -1.0 for row in own])
    worst: dict[int, float] = {}
    for row in attacked:
        if row["model"] == name and "margin" in row and "alpha" not in row:
            worst[row["index"]] = min(row["margin"], worst.get(row["index"], 1.0))
    if worst:
        told |= _margins("attacked-", list(worst.values()))
    return [{"model": name, "metric": metric, "value": e.value, "low": e.low, "high": e.high, "n": e.n,
             "estimate": True} for metric, e in told.items()]


def _margins(prefix: str, margins: list[float]) -> dict[str, stats.Estimate]:
    found = {f"{prefix}margin": stats.mean(margins)}
    for alpha in ALPHAS:
        share = margin_statistics(torch.tensor(margins, dtype=torch.float64), alpha).share_above
        found[f"{prefix}kept@{alpha:g}"] = stats.clopper_pearson(round(share * len(margins)), len(margins))
    return found
