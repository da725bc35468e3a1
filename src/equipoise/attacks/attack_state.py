"""What an attack knows about its images: kept while it runs, and continued from after an
interruption."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise.attacks.search_state import SearchResult
from equipoise.core import checks

SURVIVED, CLEAN = -1, 0  # numbers beside those of the stages, which begin at 1


@dataclass(eq=False)
class AttackState:
    """What is known about N attacked images, on the CPU; a few numbers per image."""

    stages: tuple[str, ...]
    predicted: Tensor  # (N,) class at the nearest point
    margin: Tensor  # (N,) smallest signed probability margin so far
    logit_margin: Tensor  # (N,) smallest signed logit margin so far
    clean_logit_margin: Tensor  # (N,) that of the clean image
    broken_stage: Tensor  # (N,) number of the stage that broke the image, 0 if it was misclassified clean, −1 if none
    passes: Tensor  # (N,) network passes with a gradient so far; one without counts a third
    # (N,) number of the first stage the image has not met; the clean image is stage 0
    next_stage: Tensor
    images: Tensor | None = None  # (N, C, H, W) nearest points, if they are kept

    @classmethod
    def new(cls, stages: Sequence[str], count: int, images: Tensor | None = None) -> Self:
        """The state before anything is known; `images` are the clean images, if nearest points are
        kept."""
        checks.require(
            len(set(stages)) == len(stages), "stages", "have different names", tuple(stages)
        )
        unknown = torch.full((count,), torch.inf)
        return cls(
            tuple(stages),
            torch.zeros(count, dtype=torch.int64),
            unknown,
            unknown.clone(),
            unknown.clone(),
            torch.full((count,), SURVIVED),
            torch.zeros(count),
            torch.zeros(count, dtype=torch.int64),
            images,
        )

    @property
    def survived(self) -> Tensor:
        """(N,) images that no stage has broken."""
        return self.broken_stage == SURVIVED

    @property
    def margin_ratio(self) -> Tensor:
        """(N,) the share of its clean logit margin that an image has left; 1 where logits are
        infinite.

        Neither scaling nor shifting the logits changes it, unlike probability margins: of a network
        with logits a hundred times as large they are all near 1 until the image breaks.
        """
        return (self.logit_margin / self.clean_logit_margin).nan_to_num(nan=1.0)

    def broken_by(self, row: int) -> str | None:
        """The name of the stage that broke the image, "clean" if it was misclassified clean, None
        if it survived."""
        number = int(self.broken_stage[row])
        return None if number == SURVIVED else ("clean", *self.stages)[number]

    def skip(self, number: int, mask: Tensor) -> None:
        """Stage `number` is not run on these of the images that it comes next for."""
        self.next_stage[mask & (self.next_stage == number)] = number + 1

    def update(self, number: int, result: SearchResult, cost: float = 0.0) -> None:
        """Stage `number`, whose whole search has this cost, has finished with the images of the
        result."""
        rows, margin, broken = result.rows, result.margin.float().cpu(), result.broken.cpu()
        nearer = (margin < self.margin[rows]) | broken
        self.margin[rows[nearer]] = margin[nearer]
        logit_margin = result.logit_margin.float().cpu()
        self.logit_margin[rows] = torch.minimum(self.logit_margin[rows], logit_margin)
        if number == CLEAN:
            self.clean_logit_margin[rows] = logit_margin
        self.predicted[rows[nearer]] = result.predicted.cpu()[nearer]
        self.broken_stage[rows[broken]] = number
        self.passes[rows] += cost * result.share
        self.next_stage[rows] = number + 1
        if self.images is not None:
            nearest = result.images[nearer.to(result.images.device)]
            self.images[rows[nearer].to(self.images.device)] = nearest.to(self.images)

    def resumed(self, known: AttackState) -> AttackState:
        """A copy of a state from an earlier run, if it is one of these stages and as many
        images."""
        checks.require(
            isinstance(known, AttackState), "state", "be an AttackState", type(known).__name__
        )
        checks.require(
            known.stages == self.stages,
            "state",
            f"be of the stages {', '.join(self.stages)}",
            known.stages,
        )
        for name in (field.name for field in dataclasses.fields(self) if field.name != "stages"):
            given, wanted = _signature(getattr(known, name)), _signature(getattr(self, name))
            checks.require(given == wanted, f"state.{name}", f"be {wanted}", given)
        last = len(self.stages)
        for name, low, high in (("broken_stage", SURVIVED, last), ("next_stage", CLEAN, last + 1)):
            value = getattr(known, name)
            checks.require(
                bool(((value >= low) & (value <= high)).all()),
                f"state.{name}",
                f"lie in {low}..{high}",
                value.tolist(),
            )
        return copy.deepcopy(known)


def _signature(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
