"""What every objective looks like from the loop, and the verdicts it is judged by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.settings import Settings
from equipoise.training.plan import TrainingPlan

Memory = dict[str, Tensor]


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective says of B images."""

    losses: Tensor  # (B,) with gradient; the loop minimises their mean over the whole batch
    correct: Tensor  # (B,) bool: answered rightly on the inputs the objective trains on
    memory: Memory = field(default_factory=dict)  # (B, …) what to remember of each image until its next epoch


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """Settings, and a function of model, images, labels and chance.

    A subclass is one training method. It must not keep anything between calls: what an image is to be
    remembered by goes through `memory`, which the loop keeps beside the weights.
    """

    recordable: ClassVar[bool] = True  # whether a step can be compiled or captured: the host decides nothing in it

    @abstractmethod
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """Losses of images (B, C, H, W) in [0, 1] with labels (B,).

        Args:
            model: images → logits (B, K), in training mode; attacks inside put it into evaluation mode.
            x: images.
            y: labels.
            stream: the chance of these images in this epoch.
            memory: rows (B, …) of what :meth:`memory` began with.
        """

    def suits(self, plan: TrainingPlan) -> None:
        """Refuse a plan under which something else would be learnt; asked before the first step."""

    def reads(self, model: nn.Module) -> dict[str, str]:
        """What of a model its weights do not tell and the run must know it by, such as where a gate looks."""
        return {}

    def at(self, epoch: int, epochs: int) -> Self:
        """The objective as it is in one epoch (from 0 on): warm-ups are settings that change with time."""
        return self

    def memory(self, count: int) -> Memory:
        """What is remembered of each of `count` images at first; float tensors of shape (count, …)."""
        return {}

    def judge(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream) -> dict[str, Tensor]:
        """(B,) bool for every measure of held-out images, the model being in evaluation mode.

        The last one chooses the best epoch.
        """
        return {"clean": right(model(x), y)}


def no_blanks(plan: TrainingPlan) -> None:
    """Refuse blank pixels where clean images are told from attacked ones: an attack moves them, and that shows.

    On a pair of ResNet-18 a gate that learnt on padded crops told 0.19 from 0.94 by their borders (medians of alpha),
    and 0.49 from 0.52 on images without.
    """
    for name, value in (("pad", plan.pad), ("cutout", plan.cutout)):
        checks.require(value == 0, name, "be 0 where attacked images are told from clean ones, because an attack on "
                       "blank pixels shows", value)


def right(scores: Tensor, y: Tensor) -> Tensor:
    """(B,) whether the greatest of the scores (B, K) is that of the label."""
    return scores.detach().argmax(dim=1) == y


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B,) cross-entropy; with smoothing s the target is (1 − s)·onehot + s/K."""
    return torch.nn.functional.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)


def divergence(log_p: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ p) over the last axis; the target's gradient is kept."""
    return torch.nn.functional.kl_div(log_p, target, reduction="none").sum(dim=-1)
