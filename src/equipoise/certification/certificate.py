"""What certification hands out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ABSTAIN = -1


@dataclass(frozen=True, eq=False)
class Certificate:
    """For each of B images: with probability at least 1 − failure, the class holds within the radius.

    All tensors are on the CPU. `predicted` is ABSTAIN where no radius above zero could be shown.
    """

    predicted: Tensor  # (B,) int64
    radius: Tensor  # (B,) float64, ℓ2, in [0, 1] pixels; 0 where abstained
    lower: Tensor  # (B,) float64: lower bound on the probability of `chosen`
    chosen: Tensor  # (B,) int64: the class that the first samples chose
    samples: Tensor  # (B,) int64: forward passes spent, those that chose the class included
    votes: Tensor  # (B, K) float64: how often each class won (soft: summed probabilities) after the choice
    counted: Tensor  # (B,) int64: samples behind `votes`
    failure: Tensor  # (B,) float64: failure allowed to a statement made from `votes`

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def shares(self) -> Tensor:
        """(B, K) estimated class probabilities: estimates, not bounds."""
        return self.votes / self.counted.unsqueeze(1)


def joined(parts: Sequence[Certificate]) -> Certificate:
    """Certificates of several batches as one."""
    names = [field.name for field in dataclasses.fields(Certificate)]
    return Certificate(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def made(predicted: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """A class without a radius above zero is no certificate."""
    sure = radius > 0
    return torch.where(sure, predicted, ABSTAIN), torch.where(sure, radius, 0.0)
