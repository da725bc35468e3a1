"""One model under one attack over a data set: rows, appended as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from equipoise import checks, device, losses, memory, progress, rng
from equipoise.data import Dataset, pixels
from equipoise.modes import inference
from equipoise.records import Row, Run, key_of, rows_of
from equipoise.rng import Stream
from equipoise.threat import Threat


class Attack(Protocol):
    """What every attack looks like from outside; other settings are bound beforehand."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """(B, C, H, W) images → attacked images."""


def untouched(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
    """The attack that does nothing: clean accuracy is accuracy under it."""
    return x


@dataclass(frozen=True)
class Subject:
    """A model, or a mixture at one alpha, under one attack."""

    name: str
    model: nn.Module
    attack: str
    run: Attack
    alpha: float | None = None

    def __str__(self) -> str:
        return f"{self.name}{'' if self.alpha is None else f' (alpha {self.alpha:g})'}, {self.attack}"


@dataclass(frozen=True)
class Conditions:
    """What is the same for every subject of an evaluation."""

    threat: Threat
    device: torch.device = field(default_factory=lambda: device.pick("auto"))
    seed: int = 0
    batch_size: int = 128
    precision: str = "auto"

    def __post_init__(self) -> None:
        checks.whole("batch_size", self.batch_size, least=1)
        checks.one_of("precision", self.precision, device.PRECISIONS)


def attacked(subject: Subject, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Attack every image of `data` that the run has no row for yet.

    The grid of batches is fixed by the batch size alone, and whole batches are skipped, done again, or
    given to a process: a resumed or sharded run meets every image in the same company, so not even
    rounding differs.
    """
    size = conditions.batch_size
    batches = torch.arange(len(data)).split(size)[run.world.rank :: run.world.size]
    right = seen = 0
    with progress.task(str(subject), total=sum(map(len, batches))) as task:
        for rows in batches:
            batch = data.take(rows)
            if any((i, subject.name, subject.attack, subject.alpha) not in run.done for i in batch.index.tolist()):
                judged = [row for _, part in memory.in_batches(_Judge(subject, batch, conditions), len(batch), size)
                          for row in part]
                run.append([row for row in judged if key_of(row) not in run.done])
                right, seen = right + sum(row["correct"] for row in judged), seen + len(judged)
            task.advance(len(batch), standing=f"{right}/{seen}")


@dataclass(frozen=True)
class _Judge:
    subject: Subject
    batch: Dataset
    conditions: Conditions

    def __call__(self, rows: slice) -> list[Row]:
        subject, conditions = self.subject, self.conditions
        batch = self.batch.take(torch.arange(rows.start, rows.stop))
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        chance = rng.stream(conditions.seed, subject.attack, batch.index.to(conditions.device))
        with inference(subject.model), device.precision(conditions.precision, conditions.device):
            x_adv = subject.run(subject.model, x, y, threat=conditions.threat, stream=chance)
            with torch.no_grad():
                logits = checks.logits(subject.model(x_adv), len(x)).float()
        checks.labels(y, logits.shape[1])
        predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
        found = rows_of(batch.index.tolist(), model=subject.name, attack=subject.attack, label=y.tolist(),
                        predicted=predicted.tolist(), correct=(predicted == y).tolist(),
                        margin=[round(value, 6) for value in margin.tolist()])
        return found if subject.alpha is None else [{**row, "alpha": subject.alpha} for row in found]
