"""The only epoch loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import checks, memory, parallel, progress
from equipoise.core import device as devices
from equipoise.data.dataset import Dataset
from equipoise.models import formats
from equipoise.training import compilation, ema, schedules
from equipoise.training.cuda_graph import CapturedSteps
from equipoise.training.learner import NEVER, Learner
from equipoise.training.loader import TrainingLoader, split
from equipoise.training.objective import Objective
from equipoise.training.plan import TrainingPlan
from equipoise.training.recorder import LAST, RunRecorder
from equipoise.training.validate import validate

GLANCE = 0.5  # seconds between two looks at the loss, each of which waits for the device


def train(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    plan: TrainingPlan | None = None,
    *,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Train a module by an objective on a part of a data set, and validate it on the rest.

    Every chance is a function of (seed, epoch, image), so a run that is killed and repeated, or shared out
    among processes, goes the same way. On the CPU in fp32 a resumed run ends in the same bits.

    Args:
        model: any module that the objective can call; parameters that need no gradient are left alone.
        objective: what to lower, such as `SmoothMix(sigma=0.5)`.
        data: training images; the held-out part is drawn from them.
        plan: epochs, optimiser, schedule and the rest.
        device: where to train; under `torchrun` each process has its own.
        out: run folder; a folder that holds a part of this very run is resumed. Without it nothing is kept.
        facts: what else makes this run what it is (such as the architecture), for `run.toml` and the checkpoints.

    Returns:
        The same module with its final weights (their average, with `ema`), in evaluation mode.
    """
    plan, device = plan or TrainingPlan(), torch.device(device)
    devices.usable(plan.precision, device)
    objective.suits(plan)
    kept, held = split(data, plan)
    feed = TrainingLoader(kept, plan, device)
    checks.require(not (parallel.world().size > plan.batch_size), "batch_size", "be at least the number of processes",
                   plan.batch_size)
    book = RunRecorder(out, model, objective, data, plan, device, facts or {})
    if book.finished and book.folder is not None:
        model.load_state_dict(formats.read_safetensors(book.folder / LAST)[0])
        return model.to(device).eval()
    try:
        with compilation.tuned(device):
            _Sitting(model, objective, feed, held, plan, book).work()
    except RuntimeError as error:
        # A smaller batch would be another training, so it is not halved here as it is in an evaluation.
        checks.require(not memory.is_out_of_memory(error), "batch_size", f"fit into the memory of this {device.type}",
                       plan.batch_size)
        raise
    return model.eval()


class _Sitting:
    """One sitting at a run: from where it stood to its end."""

    def __init__(self, model: nn.Module, objective: Objective, feed: TrainingLoader, held: Dataset, plan: TrainingPlan,
                 book: RunRecorder) -> None:
        self.objective, self.feed, self.held, self.plan, self.book = objective, feed, held, plan, book
        self.how = compilation.how(plan, model, feed, objective)
        self.learner = Learner(model, plan, feed.device, objective.memory(len(feed)), self.how in ("model", "both"))
        self.captured = CapturedSteps(self.learner, feed) if self.how in ("graph", "both") else None
        self.best: dict[str, Any] = {"value": -1.0, "epoch": -1, "right": {}}
        self.best_weights: dict[str, Tensor] | None = None
        self.rehearsed = 0.0
        self.last: dict[str, int] = {}
        self.step = 0
        self._began = (0.0, 0)
        self._glanced: tuple[float, dict[str, str]] = (0.0, {})

    def work(self) -> None:
        plan, learner = self.plan, self.learner
        self.step, more = self.book.resume(learner)
        self.best.update({key: more[key] for key in self.best if key in more})
        first = self.step // self.feed.steps
        self._rehearse(first)
        self._began = (time.monotonic(), self.step)
        whole, done = self.feed.images_in(plan.epochs * self.feed.steps), self.feed.images_in(self.step)
        with progress.task("training", total=whole, done=done) as task:
            for epoch in range(first, plan.epochs):
                self._epoch(epoch, task)
        if not self.last:
            self.last = self._validate()
        self._save()
        self.book.close(len(self.held), self.best, self.last, self.rehearsed)
        if learner.average is not None:
            learner.model.load_state_dict(learner.average.module.state_dict())

    def _epoch(self, epoch: int, task: progress.Task) -> None:
        began, before = time.monotonic(), self.step
        for seen in self._steps(epoch):
            self.step += seen
            task.advance(self.feed.images_in(self.step) - self.feed.images_in(self.step - seen), **self._glance())
            # The end of an epoch is saved with its row and its validation, below.
            if self.learner.world.size == 1 and self.step % self.feed.steps and self.book.due(self.plan.save_seconds):
                self._check()
                self._save()
        if self.learner.world.size > 1:
            self.learner.gather(self.feed.own(epoch))
        self._check()
        row = self._row(epoch, before, began)
        self.last = {}
        if (epoch + 1) % self.plan.validate_every == 0 or epoch + 1 == self.plan.epochs:
            self.last = self._validate()
            row |= {metric: right / max(len(self.held), 1) for metric, right in self.last.items()}
            self._remember(epoch)
        self.book.row(row)
        self.learner.tally.copy_(torch.tensor([0.0, 0.0, 0.0, NEVER], dtype=torch.float64))
        if self.book.due(self.plan.save_seconds):
            self._save()

    def _save(self) -> None:
        self.book.save(self.learner, self.step, self.best, self.best_weights)
        self.best_weights = None  # they are on disk

    def _steps(self, epoch: int) -> Iterator[int]:
        """Make the steps of an epoch that are not made yet; yields how many were made since the last yield."""
        feed, plan, now = self.feed, self.plan, self.objective.at(epoch, self.plan.epochs)
        self.learner.begin(now)
        first = self.step - epoch * feed.steps
        if self.captured is not None and first < self.captured.full:
            self.captured.begin(epoch)
            self.captured.ready(now)
            chunk = max(1, self.captured.full // 8)
            while first < self.captured.full:
                count = min(chunk, self.captured.full - first)
                self.captured.run(first, count)
                first += count
                yield count
        for step, share in enumerate(feed.shares(epoch, first), start=epoch * feed.steps + first):
            self.learner.learn(share, feed.chance(epoch, share.index), rate=schedules.rate(plan, step, feed.steps),
                               follow=ema.share(plan.ema, step), step=step)
            yield 1

    def _rehearse(self, epoch: int) -> None:
        """Compile or capture before the clock starts; nothing of it stays in the weights."""
        if self.how == "off" or epoch >= self.plan.epochs:
            return
        began, now = time.monotonic(), self.objective.at(epoch, self.plan.epochs)
        self.learner.begin(now)
        if self.captured is not None:
            try:
                self.captured.begin(epoch)
                self.captured.ready(now)
            except RuntimeError as problem:
                warnings.warn(f"the step could not be captured and is launched piece by piece: {problem}",
                              RuntimeWarning, stacklevel=2)
                self.learner.optimizer.zero_grad(set_to_none=True)
                self.captured = None
        else:
            share = next(self.feed.shares(epoch, 0))
            with self.learner.rehearsal():
                for _ in range(2):
                    self.learner.learn(share, self.feed.chance(epoch, share.index), rate=0.0, follow=0.0, step=0)
        torch.cuda.synchronize(self.feed.device)
        self.rehearsed = time.monotonic() - began
        self.book.begun = time.monotonic()

    def _validate(self) -> dict[str, int]:
        if len(self.held) == 0:
            return {}
        return validate(self.learner.judged, self.objective, self.held, self.plan, self.feed.device)

    def _remember(self, epoch: int) -> None:
        """Keep the weights of the best epoch so far; of equals, the later; without held-out images, the last."""
        value = float(list(self.last.values())[-1]) if self.last else float(epoch)
        if value >= self.best["value"]:
            self.best = {"value": value, "epoch": epoch, "right": dict(self.last)}
            if self.book.folder is not None:
                self.best_weights = {key: held.clone() for key, held in self.learner.judged.state_dict().items()}

    def _row(self, epoch: int, before: int, began: float) -> dict[str, Any]:
        total, right, images, _ = self.learner.tally.tolist()
        seconds = time.monotonic() - began
        per_second = (self.feed.images_in(self.step) - self.feed.images_in(before)) / max(seconds, 1e-9)
        return {"index": epoch, "model": "trained", "attack": "epoch", "loss": total / images,
                "accuracy": right / images, "lr": schedules.rate(self.plan, self.step - 1, self.feed.steps),
                "seconds": round(seconds, 3), "images_per_second": round(per_second, 1)}

    def _glance(self) -> dict[str, str]:
        """Loss, accuracy and speed for the progress bar, now and then."""
        now = time.monotonic()
        if now - self._glanced[0] >= GLANCE:
            if self.learner.world.size == 1:  # several processes stop together, at the end of the epoch
                self._check()
            total, right, images, _ = self.learner.tally.tolist()
            shown = {"loss": f"{total / max(images, 1):.3f}", "accuracy": f"{right / max(images, 1):.3f}"}
            made, since = self.step - self._began[1], now - self._began[0]
            if made and since:
                shown["images/s"] = f"{made * self.plan.batch_size / since:.0f}"
            self._glanced = (now, shown)
        return self._glanced[1]

    def _check(self) -> None:
        """Stop at a loss that is not finite."""
        first = float(self.learner.tally[3])
        if first < NEVER:
            self.book.keep_best(self.learner, self.best, self.best_weights)
            raise checks.InputError(f"the loss must stay finite, got NaN or infinity at step {int(first)} (epoch "
                                    f"{int(first) // self.feed.steps}){self.book.left()}")
