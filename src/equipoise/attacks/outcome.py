"""What is known of every image while attack after attack goes over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.attacks.engine import SearchResult
from equipoise.core import checks

STANDING, CLEAN = -1, 0


@dataclass
class AttackState:
    """What is known of N images so far, on the CPU; a few numbers per image."""

    stages: tuple[str, ...]
    predicted: Tensor  # (N,) class at the nearest point
    margin: Tensor  # (N,) smallest signed probability margin seen
    broken: Tensor  # (N,) number of the stage that broke the image, 0 if it was wrong untouched, −1 if it stands
    passed: Tensor  # (N,) stages it has met, the look at the untouched image being the first
    images: Tensor | None  # (N, C, H, W) nearest points, where they were asked for

    @property
    def standing(self) -> Tensor:
        """(N,) which images no attack has broken."""
        return self.broken == STANDING

    def broken_by(self, row: int) -> str | None:
        """The name of what broke the image: an attack, or "clean"."""
        number = int(self.broken[row])
        return None if number == STANDING else ("clean", *self.stages)[number]

    def learn(self, number: int, found: SearchResult) -> None:
        """Stage `number` is over for these images."""
        rows, margin = found.jobs, found.margin.float().cpu()
        fooled = found.fooled.cpu()
        nearer = (margin < self.margin[rows]) | fooled
        self.margin[rows[nearer]] = margin[nearer]
        self.predicted[rows[nearer]] = found.predicted.cpu()[nearer]
        self.broken[rows[fooled]] = number
        self.passed[rows] = number + 1
        if self.images is not None:
            self.images[rows[nearer]] = found.nearest.cpu()[nearer].to(self.images.dtype)


def fresh(names: Sequence[str], count: int, images: Tensor | None = None) -> AttackState:
    """Nothing known yet."""
    checks.require(len(set(names)) == len(names), "stages", "have different names", tuple(names))
    return AttackState(tuple(names), torch.zeros(count, dtype=torch.int64), torch.full((count,), torch.inf),
                   torch.full((count,), STANDING), torch.zeros(count, dtype=torch.int64), images)


def taken_up(known: AttackState, like: AttackState) -> AttackState:
    """An outcome from outside, if it is one of these stages over so many images."""
    checks.require(isinstance(known, AttackState), "known", "be an Outcome", type(known).__name__)
    checks.require(known.stages == like.stages, "known", f"be of the stages {', '.join(like.stages)}", known.stages)
    for name in ("predicted", "margin", "broken", "passed", "images"):
        there, here = _kind(getattr(known, name)), _kind(getattr(like, name))
        checks.require(there == here, f"known.{name}", f"be {here}", there)
    last = len(like.stages)
    for name, low, high in (("broken", STANDING, last), ("passed", 0, last + 1)):
        value = getattr(known, name)
        checks.require(bool(((value >= low) & (value <= high)).all()), f"known.{name}", f"lie in {low}..{high}",
                       value.tolist())
    return known


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
