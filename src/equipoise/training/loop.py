"""The training loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.core import checks, format, interrupts, memory, parallel, progress, rng
from equipoise.core import device as devices
from equipoise.core.modes import inference
from equipoise.core.notebook import NotebookResult
from equipoise.core.records import nothing_left_on_refusal
from equipoise.core.results import Result, Summary, read_summary
from equipoise.core.rows import EPOCH, EpochRow, Row
from equipoise.data import Dataset, batches
from equipoise.models import checkpoint
from equipoise.training.compilation import CapturedSteps, compile_mode, cudnn_benchmark
from equipoise.training.learner import Learner, TrainingStatistics
from equipoise.training.loader import TrainingLoader, split
from equipoise.training.objective import Objective, StepSchedule, TrainingPlan
from equipoise.training.recorder import LAST, RunRecorder

STEPS_PER_AGREEMENT = {
    "cpu": 1,
    "cuda": 20,
}  # of several processes about signals; it waits for a GPU


@dataclass(frozen=True, eq=False)
class TrainingResult(NotebookResult):
    """A trained model with its accuracies on held-out images; printed as a table."""

    model: (
        nn.Module
    )  # with the final weights; those of the best epoch are in `best.safetensors` of the folder
    results: tuple[Result, ...]  # of the models "best" and "last", one per validation metric
    out: Path | None = None

    def notebook_content(self) -> tuple[Summary, list[Row], Path | None]:
        """What a notebook shows: of a run that was not kept, the accuracies alone."""
        return Summary(command="train", seconds=0.0, results=self.results), [], self.out

    def __str__(self) -> str:
        return (
            format.accuracy_table(self.results, "held out from training")
            if self.results
            else "No images were held out for validation."
        )


def fit_model(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    plan: TrainingPlan | None = None,
    *,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> nn.Module:
    """Train a module with an objective on a part of a data set, validate it on the rest, and return
    it.

    All random numbers are a function of (seed, epoch, image). On the CPU in fp32 the same call ends
    in the same bits, also if it is killed and resumed, on one kind of machine with the same number
    of threads (`torch.get_num_threads`) and processes: sums of floats depend on how they are split.
    So a run is resumed only with the numbers it was started with; others train a model that is as
    good but not the same. On a GPU runs differ in their last bits.

    Ctrl-C and SIGTERM end the run after the current step, with its state saved; a second one ends
    it at once.

    Args:
        model: any module that the objective can call; parameters that need no gradient are left
            alone. In the end it is in evaluation mode and has the final weights (their average,
            with `ema`).
        objective: the loss to minimise, such as `SmoothMix(sigma=0.5)`.
        data: training images; the held-out part is drawn from them.
        out: run folder; a folder that holds a part of the same run is resumed. Without it nothing
            is written.
        metadata: what else identifies the run (such as the architecture), for `run.toml` and the
            checkpoints.
    """
    return run_training(
        model, objective, data, plan or TrainingPlan(), torch.device(device), out, metadata or {}
    ).model


def run_training(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    plan: TrainingPlan,
    device: torch.device,
    out: Path | str | None,
    metadata: Mapping[str, str],
) -> TrainingResult:
    """See :func:`fit_model`; also returns the accuracies on the held-out images."""
    devices.check_precision(plan.precision, device)
    objective.check_plan(plan)
    training, held_out = split(data, plan)
    loader = TrainingLoader(training, plan, device)
    with nothing_left_on_refusal(out):
        recorder = RunRecorder(out, model, objective, data, plan, device, metadata)
        return _run_recorded(model, objective, loader, held_out, recorder)


def _run_recorded(
    model: nn.Module,
    objective: Objective,
    loader: TrainingLoader,
    held_out: Dataset,
    recorder: RunRecorder,
) -> TrainingResult:
    device = loader.device
    if recorder.folder is not None and (recorder.folder / "summary.json").exists():
        recorder.remove_state()
        checkpoint.restore(recorder.folder / LAST, model)
        return TrainingResult(
            model.to(device).eval(), read_summary(recorder.folder).results, recorder.folder
        )
    try:
        # Objectives that are not compiled train small networks for a few epochs, and timing would
        # take longer.
        with cudnn_benchmark(device, objective.compilable):
            results = TrainingRun(model, objective, loader, held_out, recorder).run()
    except RuntimeError as error:
        # Unlike in an evaluation the batch is not halved, because a smaller batch trains another
        # model.
        checks.require(
            not memory.is_out_of_memory(error),
            "batch_size",
            f"fit into the memory of this {device.type}",
            loader.plan.batch_size,
        )
        raise
    return TrainingResult(model.eval(), results, recorder.folder)


class TrainingRun:
    """Trains from the state in the run folder, or from the start, to the end."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        loader: TrainingLoader,
        held_out: Dataset,
        recorder: RunRecorder,
    ) -> None:
        self.objective, self.loader, self.held_out = objective, loader, held_out
        self.plan, self.recorder = loader.plan, recorder
        self.compile_mode = compile_mode(
            loader.plan,
            model,
            objective,
            loader.device,
            loader.world.size,
            loader.has_room_for_epoch,
        )
        memory = objective.initial_memory(len(loader))
        self.learner = Learner(
            model, loader.plan, loader.device, memory, self.compile_mode in ("model", "both")
        )
        self.captured = (
            CapturedSteps(self.learner, loader) if self.compile_mode in ("graph", "both") else None
        )
        self.step = self.first_step = recorder.load_state(self.learner)
        self.last_correct: dict[str, int] = {}
        self.compile_seconds = 0.0
        self.shown: dict[str, str] = {}
        self.shown_time = 0.0
        self.received = interrupts.Received()

    def run(self) -> tuple[Result, ...]:
        """Train the remaining epochs; returns the accuracies of the best and of the last one."""
        epochs, loader = self.plan.epochs, self.loader
        first = self.step // loader.steps_per_epoch
        self._warm_up(first)
        if self.step:
            progress.note(f"resuming at {self._describe_step()}")
        with (
            nullcontext(self.received)
            if self.recorder.folder is None
            else interrupts.deferred() as self.received
        ):
            with progress.stage(
                "training", total=epochs * len(loader), done=loader.count_images(self.step)
            ) as stage:
                for epoch in range(first, epochs):
                    self._run_epoch(epoch, stage)
            if not self.last_correct:
                self.last_correct = self._validate()
            self.recorder.save(self.learner, self.step)
            results = self.recorder.finish(
                self.last_correct, len(self.held_out), self.compile_seconds
            )
        if self.learner.average is not None:
            self.learner.model.load_state_dict(self.learner.average.module.state_dict())
        return results

    def _run_epoch(self, epoch: int, stage: progress.StageProgress) -> None:
        learner, plan, count_images = self.learner, self.plan, self.loader.count_images
        start_time, start_images = time.monotonic(), count_images(self.step)
        for count in self._take_steps(epoch):
            before, self.step = count_images(self.step), self.step + count
            stage.advance(count_images(self.step) - before, **self._progress())
            # The end of an epoch is saved with its row and its validation, below.
            is_within_epoch = self.step % self.loader.steps_per_epoch != 0
            if is_within_epoch and (
                learner.world.size == 1
                or self.step % STEPS_PER_AGREEMENT[self.loader.device.type] == 0
            ):
                self._stop_if_asked(epoch)
            if (
                learner.world.size == 1
                and is_within_epoch
                and self.recorder.is_save_due(plan.save_seconds)
            ):
                self._read_statistics()
                self.recorder.save(learner, self.step)
        if learner.world.size > 1:
            learner.gather(self.loader.own_rows(epoch))
        statistics, seconds = self._read_statistics(), time.monotonic() - start_time
        self.last_correct = {}
        if (epoch + 1) % plan.validate_every == 0 or epoch + 1 == plan.epochs:
            self.last_correct = self._validate()
            self.recorder.update_best(epoch, self.last_correct, learner.evaluated_model)
        self.recorder.append(
            EpochRow(
                index=epoch,
                model="trained",
                attack=EPOCH,
                loss=statistics.loss,
                accuracy=statistics.accuracy,
                lr=float(self.loader.schedule(self.step - 1).learning_rate),
                seconds=round(seconds, 3),
                images_per_second=round(
                    (count_images(self.step) - start_images) / max(seconds, 1e-9), 1
                ),
                validation={
                    metric: correct / len(self.held_out)
                    for metric, correct in self.last_correct.items()
                },
            )
        )
        learner.reset_statistics()
        if epoch + 1 < plan.epochs:
            self._stop_if_asked()
        if self.recorder.is_save_due(plan.save_seconds):
            self.recorder.save(learner, self.step)

    def _stop_if_asked(self, epoch: int | None = None) -> None:
        """After a signal to any process: save the state, within `epoch` or between two, and end the
        run."""
        asked = self.received.number is not None
        if self.recorder.folder is None or not parallel.any_process(asked, self.loader.device):
            return
        if epoch is not None and self.learner.world.size > 1:
            self.learner.prepare_state(self.loader.own_rows(epoch))
        self._read_statistics()
        self.recorder.save(self.learner, self.step)
        parallel.barrier()  # `torchrun` ends the others as soon as one process has ended
        raise KeyboardInterrupt(
            f"stopped and saved at {self._describe_step()}; repeat the command to resume it there"
        )

    def _describe_step(self) -> str:
        steps, epochs = self.loader.steps_per_epoch, self.plan.epochs
        return f"epoch {min(self.step // steps + 1, epochs)} of {epochs}, step {self.step} of {epochs * steps}"

    def _take_steps(self, epoch: int) -> Iterator[int]:
        """Take the remaining steps of an epoch; yields the number of steps since the last yield."""
        loader, objective = self.loader, self.objective.at_epoch(epoch, self.plan.epochs)
        first = self.step - epoch * loader.steps_per_epoch
        if self.captured is not None and first < (full_batches := self.captured.full_batches):
            self.captured.load_epoch(epoch)
            while first < full_batches:
                count = min(max(1, full_batches // 8), full_batches - first)
                self.captured.replay(objective, first, count)
                first += count
                yield count
        for step, batch in enumerate(
            loader.batches(epoch, first), start=epoch * loader.steps_per_epoch + first
        ):
            self.learner.take_step(
                objective, batch, loader.stream(epoch, batch.index), loader.schedule(step)
            )
            yield 1

    def _warm_up(self, epoch: int) -> None:
        """Compile or capture before the clock starts; the weights do not change."""
        if self.compile_mode == "off" or epoch >= self.plan.epochs:
            return
        start_time, objective = time.monotonic(), self.objective.at_epoch(epoch, self.plan.epochs)
        if self.captured is not None:
            try:
                self.captured.load_epoch(epoch)
                self.captured.capture(objective)
            except RuntimeError as error:
                warnings.warn(
                    f"the step could not be captured as a CUDA graph and runs without one: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self.learner.optimizer.zero_grad(set_to_none=True)
                self.captured = None
        else:
            batch = next(self.loader.batches(epoch, 0))
            with self.learner.undo_steps():
                for _ in range(2):
                    self.learner.take_step(
                        objective,
                        batch,
                        self.loader.stream(epoch, batch.index),
                        StepSchedule(0, 0.0, 0.0),
                    )
        torch.cuda.synchronize(self.loader.device)
        self.compile_seconds = time.monotonic() - start_time
        self.recorder.start_time = time.monotonic()

    def _validate(self) -> dict[str, int]:
        """Number of held-out images classified correctly, by metric; the random numbers are the
        same in every epoch."""
        model, plan, device = self.learner.evaluated_model, self.plan, self.loader.device
        own = self.held_out.take(self.loader.world.shard(torch.arange(len(self.held_out))))
        correct: dict[str, int | Tensor] = {}
        with (
            inference(model),
            devices.autocast(plan.precision, device),
            torch.no_grad(),
            cudnn_benchmark(device, enabled=False),
        ):  # an attack leaves broken images out: batches of any size
            for batch in batches(own, max(plan.batch_size, 256), device=device):
                stream = rng.stream(plan.seed, "validate", batch.index)
                metrics = self.objective.validation_metrics(
                    model, batch.images, batch.labels, stream
                )
                for name, value in metrics.items():
                    correct[name] = correct.get(name, 0) + value.sum()
        counts = parallel.gather({name: int(value) for name, value in correct.items()})
        return {name: sum(part.get(name, 0) for part in counts) for name in max(counts, key=len)}

    def _progress(self) -> dict[str, str]:
        """Loss, accuracy and speed for the progress bar, updated now and then."""
        now = time.monotonic()
        if now - self.shown_time >= 0.5:  # seconds, because every update waits for the device
            # Several processes stop together, at the end of the epoch.
            statistics = (
                self._read_statistics()
                if self.learner.world.size == 1
                else self.learner.read_statistics()
            )
            speed = (
                (self.step - self.first_step)
                * self.plan.batch_size
                / max(now - self.recorder.start_time, 1e-9)
            )
            self.shown = {
                "loss": f"{statistics.loss:.3f}",
                "accuracy": f"{statistics.accuracy:.3f}",
                "images/s": f"{speed:.0f}",
            }
            self.shown_time = now
        return self.shown

    def _read_statistics(self) -> TrainingStatistics:
        """The statistics of the epoch so far; a loss that is not finite is an InputError."""
        statistics = self.learner.read_statistics()
        if (step := statistics.first_nonfinite_step) is not None:
            self.recorder.save_best(self.learner.evaluated_model)
            raise checks.InputError(
                f"the loss must stay finite, got NaN or infinity at step {step} (epoch "
                f"{step // self.loader.steps_per_epoch}){self.recorder.describe_failure()}"
            )
        return statistics
