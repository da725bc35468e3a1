"""What defines a training run: the plan with its learning-rate schedules, and the interface of an
objective."""

from __future__ import annotations

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.device import PRECISIONS
from equipoise.core.rng import Stream
from equipoise.core.settings import Settings, setting

Memory = dict[str, Tensor]  # name → (B, …) values that are kept for each image between epochs


@dataclass(frozen=True)
class StepSchedule:
    """The scheduled values of one optimiser step; tensors inside a CUDA graph."""

    number: int | Tensor
    learning_rate: float | Tensor
    average_weight: float | Tensor  # weight of the new weights in their running average


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Settings):
    """Epochs, optimiser, schedule, augmentation and precision; the defaults suit a small network on
    small images."""

    epochs: int = setting(30, "Passes over the training images.", least=1)
    batch_size: int = setting(128, "Images per optimiser step, over all processes.", least=1)
    optimizer: str = setting("sgd", "sgd or adamw.", among=("sgd", "adamw"))
    lr: float = setting(0.1, "Highest learning rate.", positive=True)
    momentum: float = setting(0.9, "Momentum of sgd; first beta of adamw.", share=True)
    nesterov: bool = setting(False, "Use Nesterov momentum.")
    weight_decay: float = setting(5e-4, "Weight decay.", fraction=True)
    schedule: str = setting(
        "cosine",
        "Learning-rate schedule: constant, step, cosine or one-cycle.",
        among=("constant", "step", "cosine", "one-cycle"),
    )
    warmup: float = setting(
        0.0, "Epochs of linear warm-up; for one-cycle, a third of all if 0.", fraction=True
    )
    step_epochs: int = setting(30, "Epochs between two drops of the step schedule.", least=1)
    step_delay: int = setting(
        0, "Epochs by which every drop of the step schedule comes later.", least=0
    )
    step_factor: float = setting(0.1, "Factor of each drop of the step schedule.", share=True)
    ema: float = setting(
        0.0, "Decay of the moving average of the weights, which is then saved; 0: off.", share=True
    )
    clip: float = setting(0.0, "Largest norm of the gradient; 0 turns clipping off.", fraction=True)
    pad: int = setting(0, "Zero padding before a random crop.", least=0, most=1024)
    flip: bool = setting(False, "Flip images horizontally with probability one half.")
    cutout: int = setting(0, "Side length of the cutout square.", least=0)
    held_out: int | None = setting(
        None, "Images held out for validation; default: a tenth, at most 1000.", least=0
    )
    validate_every: int = setting(1, "Epochs between two validations.", least=1)
    save_seconds: float = setting(
        30.0, "Seconds between saved states, from which a killed run resumes.", fraction=True
    )
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    compile: str = setting(
        "auto",
        "On a GPU: off; model (torch.compile); graph (the whole step as one CUDA graph); "
        "both; auto is graph for a small network, both for a large one, and model under "
        "several processes or where the images do not fit into memory.",
        among=("auto", "off", "model", "graph", "both"),
    )
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "adamw":
            checks.require(self.momentum < 1, "momentum", "be less than 1 for adamw", self.momentum)
        elif self.nesterov:
            checks.require(self.momentum > 0, "momentum", "be positive for nesterov", self.momentum)

    def identity(self) -> dict[str, object]:
        """The settings that can change the weights: all but those that only change the speed."""
        return {
            key: value
            for key, value in self.to_dict().items()
            if key not in ("save_seconds", "compile")
        }

    def schedule_at(self, step: int, steps_per_epoch: int) -> StepSchedule:
        """The scheduled values of optimiser step `step` (from 0 on); without state, so that
        resuming needs none.

        The weight of the average is 1 − ema, and larger in the first steps, so that the initial
        weights fade.
        """
        return StepSchedule(
            step,
            self._learning_rate(step, steps_per_epoch),
            1 - min(self.ema, (1 + step) / (10 + step)),
        )

    def _learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """With t in epochs, E epochs in all and a warm-up of w epochs.

        - the warm-up is lr · (step + 1) / (w · steps per epoch), for every schedule;
        - constant: lr; step: lr · factor^⌊(t − step_delay) / step_epochs⌋, and lr before the first
          drop;
        - cosine: lr · (1 + cos(π (t − w) / (E − w))) / 2;
        - one-cycle: after the warm-up, a straight line that would reach zero one step after the
          last.
        """
        warmup = (
            self.epochs / 3 if self.schedule == "one-cycle" and self.warmup == 0 else self.warmup
        )
        warmup_steps = warmup * steps_per_epoch
        if step + 1 < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "step":
            delayed = max(step - self.step_delay * steps_per_epoch, 0)
            return self.lr * self.step_factor ** (delayed // (self.step_epochs * steps_per_epoch))
        total = self.epochs * steps_per_epoch
        done = max(min(1.0, (step - warmup_steps) / max(total - warmup_steps, 1)), 0.0)
        return (
            self.lr * (1 - done)
            if self.schedule == "one-cycle"
            else self.lr * (1 + math.cos(math.pi * done)) / 2
        )


def downgrade_precision(plan: TrainingPlan, device: torch.device) -> TrainingPlan:
    """Replace bf16 by fp32 on a CPU, with a warning: recipes ask for bf16 because it is fast on
    GPUs."""
    if device.type != "cpu" or plan.precision != "bf16":
        return plan
    warnings.warn(
        "bf16 is for GPUs; training in fp32 on this CPU", checks.EquipoiseWarning, stacklevel=2
    )
    return dataclasses.replace(plan, precision="fp32")


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective computes for B images."""

    losses: Tensor  # (B,) with gradient; the loop minimises their mean over the whole batch
    correct: Tensor  # (B,) bool: classified correctly on the inputs the objective trains on
    memory: Memory = field(default_factory=dict)  # new values of what is kept for each image


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """A training method: its settings, and a function of model, images, labels and a random stream.

    An objective must not keep state between calls: values to be kept for an image go through
    `memory`, which the loop saves beside the weights. The first line of a subclass's docstring is
    its help text on the command line.
    """

    name: ClassVar[str]  # identifies the method in `run.toml` and in checkpoints
    version: ClassVar[int] = 1  # raised when the same settings come to mean another loss
    compilable: ClassVar[bool] = (
        True  # whether a step can be compiled or captured: no decision depends on values
    )
    detects_attacks: ClassVar[bool] = (
        False  # whether it learns to distinguish attacked images from clean ones
    )

    @abstractmethod
    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """Losses of images (B, C, H, W) in [0, 1] with labels (B,), their random stream in this
        epoch and their memory.

        The model maps images to logits (B, K) and is in training mode; attacks inside put it into
        evaluation mode.
        """

    def check_plan(self, plan: TrainingPlan) -> None:
        """Refuse a plan that does not fit the objective: padding and cutout for one that detects
        attacks, which would look at the blank pixels alone."""
        for name, value in (("pad", plan.pad), ("cutout", plan.cutout)):
            checks.require(
                value == 0 or not self.detects_attacks,
                name,
                f"be 0 for the objective {self.name}, which "
                "learns to detect attacks, because an attack on blank pixels is easy to see",
                value,
            )

    def describe(self) -> dict[str, Any]:
        """Name, version and settings, as they stand in `run.toml`."""
        return {"name": self.name, "version": self.version, **self.to_dict()}

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """The objective of one epoch (from 0 on), for settings that change during training."""
        return self

    def initial_memory(self, count: int) -> Memory:
        """What is kept for each of `count` images at first; float tensors of shape (count, …)."""
        return {}

    def validation_metrics(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream
    ) -> dict[str, Tensor]:
        """(B,) bool per metric on held-out images, the model in evaluation mode; the last selects
        the best epoch."""
        return {"clean": correct_predictions(model(x), y)}


def correct_predictions(scores: Tensor, y: Tensor) -> Tensor:
    """(B,) bool: whether the highest of the scores (B, K) is that of the label."""
    return scores.detach().argmax(dim=1) == y
