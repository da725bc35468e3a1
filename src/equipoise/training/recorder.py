"""Writes rows, checkpoints, resumable states and the summary of a training run."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise import __version__, models
from equipoise.core import checks, config, files, parallel, serialize, stats
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary
from equipoise.core.rows import EpochRow
from equipoise.core.serialize import Count, NonNegative
from equipoise.data import Dataset, class_share_notes
from equipoise.models import Normalized, checkpoint
from equipoise.training.learner import Learner
from equipoise.training.objective import Objective, TrainingPlan

BEST, LAST = "best.safetensors", "last.safetensors"
STATE = "state.pt"


@dataclass(frozen=True)
class BestEpoch:
    """The best epoch so far by the last validation metric."""

    epoch: int = -1
    score: float = -1.0
    correct: dict[str, Count] = field(
        default_factory=dict
    )  # metric → held-out images classified correctly


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: Count = 0
    best: BestEpoch = BestEpoch()
    seconds: NonNegative = 0.0  # spent on the run so far


class RunRecorder:
    """The folder of a training run; without a folder nothing is written.

    Checkpoints are written before the state: a kill in between leaves checkpoints of a later step,
    which the resumed run writes again.
    """

    def __init__(
        self,
        out: Path | str | None,
        model: nn.Module,
        objective: Objective,
        data: Dataset,
        plan: TrainingPlan,
        device: torch.device,
        metadata: Mapping[str, str],
    ) -> None:
        self.folder = None if out is None else Path(out)
        self.start_time = self.last_save = time.monotonic()
        self.earlier_seconds = 0.0
        # A module from outside the model zoo, such as a mixture, does not have this metadata
        # itself.
        architecture = (
            {}
            if isinstance(model, Normalized)
            else {
                "arch": type(model).__name__,
                "num_classes": data.num_classes,
                "image_shape": ",".join(map(str, data.image_shape)),
            }
        )
        self.checkpoint_metadata = {
            key: str(value)
            for key, value in {
                **architecture,
                "objective": objective.name,
                **objective.to_dict(),
                **plan.identity(),
                "data": str(data),
                **metadata,
            }.items()
        }
        self.notes = class_share_notes(data)
        self.best = BestEpoch()
        self.best_weights: dict[str, Tensor] | None = (
            None  # of the best epoch; None if they are on disk
        )
        self.run: Run | None = None
        self.writable_folder: Path | None = (
            None  # of the one process that writes checkpoints and rows
        )
        if self.folder is not None:
            identity = {
                "command": "train",
                **metadata,
                "objective": objective.describe(),
                "plan": plan.identity(),
                "model": models.identity(model),
                "data": data.describe(),
                **_parallelism(device),
            }
            self.run = Run(
                self.folder,
                identity,
                {
                    "device": str(device),
                    "compile": plan.compile,
                    "equipoise": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            )
            self.writable_folder = self.folder if self.run.world.is_leader else None

    @property
    def seconds(self) -> float:
        """Time spent on the run, before it was interrupted and since."""
        return self.earlier_seconds + time.monotonic() - self.start_time

    def load_state(self, learner: Learner) -> int:
        """Restore the saved state, if there is one; returns the number of steps that were taken."""
        if self.folder is None or not (self.folder / STATE).exists():
            return 0
        path = self.folder / STATE
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            config.check_schema(state, path)
            learner.load_state_dict(state["learner"])
            progress = serialize.from_plain(Progress, state["progress"], str(path))
        except checks.InputError:
            raise
        except Exception as error:  # a damaged or foreign file can raise any error
            raise checks.InputError(
                f"`{path}` must be the saved state of this run, got one that cannot be used "
                f"({type(error).__name__})"
            ) from None
        self.best, self.earlier_seconds = progress.best, progress.seconds
        return progress.step

    def update_best(self, epoch: int, correct: Mapping[str, int], model: nn.Module) -> None:
        """Keep the weights of the best epoch so far; of equals, the later; without held-out images,
        the last."""
        score = float(list(correct.values())[-1]) if correct else float(epoch)
        if score >= self.best.score:
            self.best = BestEpoch(epoch, score, dict(correct))
            if self.folder is not None:
                self.best_weights = {
                    key: value.clone() for key, value in model.state_dict().items()
                }

    def is_save_due(self, every: float) -> bool:
        """Whether `every` seconds have passed since the last save."""
        return self.writable_folder is not None and time.monotonic() - self.last_save >= every

    def save(self, learner: Learner, step: int) -> None:
        """Write the checkpoints and the state after `step` steps."""
        if self.writable_folder is None:
            return
        if not all(bool(p.isfinite().all()) for p in learner.parameters):
            raise checks.InputError(
                f"the weights must stay finite, got NaN or infinity after step {step}"
                f"{self.describe_failure()}"
            )
        self.save_best(learner.evaluated_model)
        checkpoint.save(
            self.writable_folder / LAST,
            learner.evaluated_model,
            {**self.checkpoint_metadata, "step": str(step)},
        )
        progress = serialize.to_plain(Progress(step, self.best, self.seconds))
        with files.atomic_writer(self.writable_folder / STATE) as file:
            torch.save(
                {
                    "schema": config.SCHEMA,
                    "version": __version__,
                    "progress": progress,
                    "learner": learner.state_dict(),
                },
                file,
            )
        self.last_save = time.monotonic()

    def save_best(self, model: nn.Module) -> None:
        """Write the weights of the best epoch, unless they are on disk already or not finite."""
        weights, self.best_weights = self.best_weights, None
        if weights is None or self.writable_folder is None:
            return
        # Only parameters are checked: buffers may be infinite, such as the log-odds of 0.
        if not all(bool(weights[name].isfinite().all()) for name, _ in model.named_parameters()):
            return
        current = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(weights)
        try:
            checkpoint.save(
                self.writable_folder / BEST,
                model,
                {**self.checkpoint_metadata, "epoch": str(self.best.epoch)},
            )
        finally:
            model.load_state_dict(current)

    def describe_failure(self) -> str:
        """What a diverged run leaves behind and what to try, as the end of a sentence."""
        if self.folder is None:
            return " (try a lower lr, or clip)"
        saved = any((self.folder / name).exists() for name in (LAST, BEST))
        kept = (
            f"the last good checkpoint in {self.folder} was kept"
            if saved
            else "no checkpoint had been saved"
        )
        return f"; {kept} (try a lower lr, or clip, and another folder)"

    def append(self, row: EpochRow) -> None:
        """Write the row of an epoch."""
        if self.run is not None and self.run.world.is_leader:
            self.run.append([row])

    def finish(
        self, last_correct: Mapping[str, int], held_out: int, compile_seconds: float
    ) -> tuple[Result, ...]:
        """Merge the rows, write the summary, delete the state; returns accuracies of the best and
        the last epoch."""
        results = tuple(
            Result.of(model, metric, stats.clopper_pearson(correct, held_out))
            for model, counts in (("best", self.best.correct), ("last", last_correct))
            for metric, correct in counts.items()
        )
        if self.run is not None:
            self.run.finish()
            self.run.write_summary(
                Summary(
                    command="train",
                    seconds=self.seconds,
                    results=results,
                    notes=self.notes,
                    best_epoch=self.best.epoch,
                    compile_seconds=round(compile_seconds, 1),
                )
            )
        self.remove_state()
        return results

    def remove_state(self) -> None:
        """Delete the state of a finished run."""
        if self.writable_folder is not None:
            (self.writable_folder / STATE).unlink(missing_ok=True)


def _parallelism(device: torch.device) -> dict[str, object]:
    """What the order of additions, and with it the last bits of the weights, depends on."""
    threads: object = torch.get_num_threads() if device.type == "cpu" else f"any on {device.type}"
    return {"threads": threads, "processes": parallel.world().size}
