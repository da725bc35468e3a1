"""One model under one attack over a data set: rows, appended as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import Suite
from equipoise.attacks.suite import inside
from equipoise.core import checks, device, losses, memory, progress, rng
from equipoise.core.modes import inference
from equipoise.core.records import Row, Run, key_of, rows_of
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job
from equipoise.evaluation.staged import staged

Witness = Callable[[nn.Module, Tensor, Tensor], Mapping[str, Sequence[Any]]]


def attacked(subject: Job, data: Dataset, run: Run, conditions: Conditions, witness: Witness | None = None) -> None:
    """Attack every image of `data` that the run has no row for yet.

    A list of stages keeps its own batches full (:mod:`equipoise.evaluation.staged`). For a plain function the
    grid of batches is fixed by the batch size alone, and whole batches are skipped, done again, or given to
    a process: a resumed or sharded run meets every image in the same company, so not even rounding differs.

    A `witness` is shown the model, the attacked images (B, C, H, W) and their labels (B,), and answers with further
    columns. A list then goes as a plain function does: stage by stage there is no one batch to be shown.
    """
    if witness is None and isinstance(subject.run, Suite):
        staged(subject, subject.run, data, run, conditions)
        return
    size = conditions.batch_size
    batches = torch.arange(len(data)).split(size)[run.world.rank :: run.world.size]
    right = seen = 0
    with progress.task(str(subject), total=sum(map(len, batches))) as task:
        for rows in batches:
            batch = data.take(rows)
            if any((i, subject.name, subject.attack, subject.alpha) not in run.done for i in batch.index.tolist()):
                judge = _Judge(subject, batch, conditions, witness)
                judged = [row for _, part in memory.in_batches(judge, len(batch), size) for row in part]
                run.append([row for row in judged if key_of(row) not in run.done])
                right, seen = right + sum(row["correct"] for row in judged), seen + len(judged)
            task.advance(len(batch), standing=f"{right}/{seen}")


@dataclass(frozen=True)
class _Judge:
    subject: Job
    batch: Dataset
    conditions: Conditions
    witness: Witness | None

    def __call__(self, rows: slice) -> list[Row]:
        subject, conditions = self.subject, self.conditions
        batch = self.batch.take(torch.arange(rows.start, rows.stop))
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        chance = rng.stream(conditions.seed, subject.attack, batch.index.to(conditions.device))
        exact = device.exactly(conditions.device)
        chosen = exact if conditions.precision == "fp32" else device.precision(conditions.precision, conditions.device)
        with inference(subject.model), chosen:
            x_adv = subject.run(subject.model, x, y, threat=conditions.threat, stream=chance)
            inside(subject.attack, x_adv, x, conditions.threat)
        # Bfloat16Copy precision finds attacks; what counts is the model itself.
        with inference(subject.model), torch.no_grad(), device.exactly(conditions.device):
            logits = checks.logits(subject.model(x_adv), len(x)).float()
            told = {} if self.witness is None else self.witness(subject.model, x_adv, y)
        checks.labels(y, logits.shape[1])
        predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
        found = rows_of(batch.index.tolist(), model=subject.name, attack=subject.attack, label=y.tolist(),
                        predicted=predicted.tolist(), correct=(predicted == y).tolist(),
                        margin=[round(value, 6) for value in margin.tolist()], **told)
        return found if subject.alpha is None else [{**row, "alpha": subject.alpha} for row in found]
