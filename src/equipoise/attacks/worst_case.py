"""Attack after attack over the images still standing: what breaks an image once has broken it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.attacks.batch_invariance import indifferent
from equipoise.attacks.engine import AttackBatch, BatchShape, Search, SearchResult, hunt
from equipoise.attacks.gradients import Extra, GradientSource
from equipoise.attacks.outcome import CLEAN, AttackState, fresh, taken_up
from equipoise.core import checks, memory, progress, rng
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

CPU_GRAIN = 8
BLOCK = 128  # rows of every pass of a list that is called on a larger batch
T = TypeVar("T")


class Stage(Protocol):
    """One attack of a list: a name, and how it searches (None: this model cannot be attacked so)."""

    @property
    def name(self) -> str:
        """As it stands in rows and reports; unlike all others of the list."""

    def search(self, adversary: GradientSource, threat: Threat) -> Search | None:
        """The search against this adversary's model."""


def worst_case(
    stages: Sequence[Stage],
    model: nn.Module,
    data: Dataset,
    *,
    threat: Threat,
    seed: int,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    follow: str = "model",
    precision: str = "auto",
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    whole: Dataset | None = None,
    known: AttackState | None = None,
    note: Callable[[int, SearchResult], None] | None = None,
    keep_images: bool = False,
    title: str = "attacking",
) -> AttackState:
    """Fold a list of attacks over the images that none of them has broken yet.

    Images stay bytes; only a batch of them is in work at a time, refilled across the whole data set as
    images break. Verdict and margin of an image do not depend on the other images, on the number of
    processes, or on where a run was interrupted (:mod:`equipoise.attacks.engine`); on the CPU not on the
    batch size either. On CUDA every pass sees exactly `batch_size` images, or as many as `whole` has, so
    another batch size rounds differently, and so does a batch that was halved for lack of memory.

    Args:
        stages: the attacks, cheap and strong first; :mod:`equipoise.attacks.auto` has lists.
        model: decides success: images (B, C, H, W) in [0, 1] → logits (B, K), on `device`.
        data: the images.
        threat: the ball.
        seed: of all chance.
        surrogate, extra, follow, precision: see :class:`~equipoise.attacks.gradients.GradientSource`.
        batch_size: images in work at a time; halved when memory runs out.
        device: where to compute.
        whole: the set of which `data` is a share or what is left, if it is one: shapes of batches and tests of
            precision follow it, so that every share meets the same.
        known: what an earlier sitting has learnt; it is taken up there.
        note: called with every finding, for those who keep a journal.
        keep_images: also keep the nearest point of every image.
        title: of the progress bar.
    """
    checks.whole("batch_size", batch_size, least=1)
    checks.require(len(data) > 0, "data", "hold at least one image", 0)
    names = [stage.name for stage in stages]
    outcome = fresh(names, len(data), pixels(data.images) if keep_images else None)
    outcome = outcome if known is None else taken_up(known, outcome)
    where = torch.device(device)
    whole = data if whole is None else whole
    room = _Room(data, seed, where, min(batch_size, len(whole)))

    def learn(number: int, found: SearchResult) -> None:
        outcome.learn(number, found)
        if note is not None:
            note(number, found)

    with inference(model, surrogate), progress.task(title, total=len(data)) as task:
        first = _batch(whole, torch.arange(CPU_GRAIN) % len(whole), seed, where)
        adversary = GradientSource(model, surrogate, extra, follow, precision, first.x, lasting=True)
        room.separate(adversary, first)
        _look(adversary, room, outcome, learn)
        meter = _Meter(task, stages, outcome)
        for number, stage in enumerate(stages, start=1):
            search = stage.search(adversary, threat)
            if search is None:
                outcome.passed[outcome.standing & (outcome.passed == number)] = number + 1
                continue
            _excuse(stage, outcome, number)
            while len(jobs := _due(outcome, number)):
                room.work(adversary, partial(hunt, search, adversary, room.fetch, jobs), partial(learn, number), meter)
        meter.show()
    return outcome


def strike(
    stages: Sequence[Stage], model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream,
    surrogate: nn.Module | None, extra: Extra | None, follow: str, precision: str, rigid: bool = False,
) -> Tensor:
    """The same for one batch in memory, as a function of images: the contract of every attack.

    `rigid`: every pass sees as many rows as there are images, or :data:`BLOCK` at a time of more, so that no image
    rounds differently because another one was broken, and few passes are made for images that are.

    Returns:
        (B, C, H, W), detached: per image what fools the model, or else what comes nearest to it.
    """
    checks.images(x)
    checks.require(len(stream) == len(x), "stream", f"be the chance of {len(x)} images", len(stream))
    x = x.detach()
    with inference(model, surrogate):
        adversary = GradientSource(model, surrogate, extra, follow, precision, x)
        checks.labels(y, adversary.classes, len(x))
        clean = adversary.judge(x, y)
        outcome = fresh([stage.name for stage in stages], len(x))
        outcome.learn(CLEAN, SearchResult(torch.arange(len(x)), x, clean.predicted, clean.margin, clean.wrong(y)))
        best = x.clone()
        block = min(len(x), BLOCK)
        adversary.block = block if rigid else None

        def fetch(jobs: Tensor) -> AttackBatch:
            rows = jobs.to(x.device)
            return AttackBatch(x[rows], y[rows], stream[jobs.to(stream.index.device)].to(x.device))

        for number, stage in enumerate(stages, start=1):
            search, within = stage.search(adversary, threat), getattr(stage, "within", None)
            due = outcome.standing if within is None else outcome.standing & (outcome.margin < within)
            jobs = due.nonzero().squeeze(1)
            if search is None or len(jobs) == 0:
                continue
            # On CUDA the shape stays, so that one recording serves the stage.
            grain = BatchShape(len(jobs), 1) if x.device.type == "cuda" else BatchShape()
            grain = BatchShape(block, block) if rigid else grain
            for found in hunt(search, adversary, fetch, jobs, slots=len(jobs), grain=grain):
                nearer = (found.margin.float().cpu() < outcome.margin[found.jobs]) | found.fooled.cpu()
                best[found.jobs[nearer].to(x.device)] = found.nearest[nearer.to(x.device)]
                outcome.learn(number, found)
    return best.detach()


@dataclass(frozen=True)
class Suite:
    """A list of attacks with everything but the model and the images: itself an attack."""

    stages: tuple[Stage, ...]
    surrogate: nn.Module | None = None
    extra: Extra | None = None
    follow: str = "model"

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream,
                 precision: str = "auto") -> Tensor:
        """(B, C, H, W) images → attacked images; in a batch of this size each gets the same in any company."""
        return strike(self.stages, model, x, y, threat=threat, stream=stream, surrogate=self.surrogate,
                      extra=self.extra, follow=self.follow, precision=precision, rigid=True)


def _excuse(stage: Stage, outcome: AttackState, number: int) -> None:
    """A stage that is worth its cost only near the boundary leaves the other images out."""
    within = getattr(stage, "within", None)
    if within is not None:
        outcome.passed[outcome.standing & (outcome.passed == number) & (outcome.margin >= within)] = number + 1


def _due(outcome: AttackState, number: int) -> Tensor:
    return (outcome.standing & (outcome.passed == number)).nonzero().squeeze(1)


def _look(adversary: GradientSource, room: _Room, outcome: AttackState, learn: Callable[[int, SearchResult], None]) -> None:
    """The untouched images first."""
    while len(rows := (outcome.passed == 0).nonzero().squeeze(1)[: room.slots]):
        batch = room.fetch(torch.tensor(room.grain.filled(rows.tolist())))
        checks.labels(batch.y, adversary.classes)
        verdict = room.attempt(adversary, partial(adversary.judge, batch.x, batch.y))
        if verdict is None:
            continue
        n = len(rows)
        learn(CLEAN, SearchResult(rows, batch.x[:n], verdict.predicted[:n], verdict.margin[:n], verdict.wrong(batch.y)[:n]))


class _Room:
    """Where images are turned from bytes into batches, as many at a time as fit."""

    def __init__(self, data: Dataset, seed: int, device: torch.device, slots: int) -> None:
        self.data, self.seed, self.device, self.slots = data, seed, device, slots
        self.alike = False

    @property
    def rigid(self) -> bool:
        """Whether every pass sees the whole batch: on CUDA, where a recorded graph has one shape."""
        return self.device.type == "cuda"

    @property
    def grain(self) -> BatchShape:
        if self.rigid:
            return BatchShape(self.slots, self.slots)
        return BatchShape(1 if self.alike else CPU_GRAIN, CPU_GRAIN)

    def separate(self, adversary: GradientSource, batch: AttackBatch) -> None:
        """On the CPU, let blocks of images go alone through a network that would answer differently in company."""
        if not self.rigid:
            checks.labels(batch.y, adversary.classes)
            alike = None
            while alike is None:
                alike = self.attempt(adversary, partial(indifferent, adversary, batch.x, batch.y, self.slots))
            self.alike = alike
            adversary.block = None if alike else CPU_GRAIN

    def fetch(self, jobs: Tensor) -> AttackBatch:
        return _batch(self.data, jobs, self.seed, self.device)

    def work(self, adversary: GradientSource, start: Callable[..., Iterator[SearchResult]], learn: Callable[[SearchResult], None],
             meter: _Meter) -> None:
        """Take in findings until the jobs are done, or until memory runs out; then the rest comes again."""
        def take_in() -> None:
            for found in start(slots=self.slots, grain=self.grain):
                learn(found)
                meter.show()

        self.attempt(adversary, take_in)

    def attempt(self, adversary: GradientSource, work: Callable[[], T]) -> T | None:
        """What `work` gives; or None if memory ran out, and then the batch is half as large from now on."""
        try:
            return work()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error) or self.slots == 1:
                raise
        # Only here, where the error and the frames it holds are gone, is there memory to give back.
        self.slots = (self.slots + 1) // 2
        adversary.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def _batch(data: Dataset, rows: Tensor, seed: int, device: torch.device) -> AttackBatch:
    part = data.take(rows)
    x = pixels(part.images.to(device)).contiguous(memory_format=torch.channels_last)
    return AttackBatch(x, part.labels.to(device), rng.stream(seed, "attack", part.index.to(device)))


class _Meter:
    """Progress in images; an image counts by the share of the work it has behind it."""

    def __init__(self, task: progress.Task, stages: Sequence[Stage], outcome: AttackState) -> None:
        self.task, self.outcome, self.shown = task, outcome, 0
        costs = [float(getattr(stage, "cost", 1)) for stage in stages]
        self.behind = torch.tensor([0.0, *[sum(costs[:n]) / max(sum(costs), 1e-9) for n in range(len(costs) + 1)]])

    def show(self) -> None:
        standing = self.outcome.standing
        share = torch.where(standing, self.behind[self.outcome.passed.clamp(max=len(self.behind) - 1)], 1.0)
        done = int(share.double().sum() + 1e-3)
        self.task.advance(done - self.shown, standing=f"{int(standing.sum())}/{len(standing)}")
        self.shown = done
