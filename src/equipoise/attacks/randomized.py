"""Randomised models: expectation over transformation [Athalye2018] and repeated verdicts.

A randomised model classifies an image correctly with some probability, and an adversary lowers that
probability: each gradient is the mean over several passes, and a verdict counts over how many
passes an image is classified correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.attacks.cuda_graphs import TensorFunction
from equipoise.core import losses, rng
from equipoise.core.rng import Stream

# Passes per gradient, as in the "rand" version of AutoAttack, and passes per verdict
EOT, REPEATS = 20, 50
MAX_PASSES = 100_000


def average_passes(function: TensorFunction, passes: int) -> TensorFunction:
    """The mean of the outputs of a random function; one pass at a time is in memory."""

    def average(*inputs: Tensor) -> tuple[Tensor, ...]:
        total = function(*inputs)
        for _ in range(passes - 1):
            total = tuple(map(torch.add, total, function(*inputs)))
        return tuple(value / passes for value in total)

    return average


@dataclass(frozen=True)
class RepeatedVerdict:
    """What a randomised model predicts for B images over several passes."""

    share_correct: Tensor  # (B,) of the passes
    predicted: Tensor  # (B,) the most frequent class
    margin: Tensor  # (B,) mean signed probability margin of the true class
    logit_margin: Tensor  # (B,) the same of logits


@torch.no_grad()
def judge_repeatedly(logits: Callable[[], Tensor], y: Tensor, repeats: int) -> RepeatedVerdict:
    """The verdict of `repeats` passes; every call of `logits` is one, (B, K)."""
    verdicts = []
    for _ in range(repeats):
        z = logits()
        verdicts.append(
            (
                z.argmax(dim=1),
                losses.probability_margin(z, y),
                losses.signed_margin(z, y).nan_to_num(),
            )
        )
    predicted, margin, logit_margin = (
        torch.stack(values) for values in zip(*verdicts, strict=True)
    )
    return RepeatedVerdict(
        (predicted == y).double().mean(dim=0),
        predicted.mode(dim=0).values,
        margin.mean(dim=0),
        (logit_margin / repeats).sum(dim=0),
    )


def judge_with_new_passes(
    logits: Callable[[], Tensor], y: Tensor, stream: Stream, repeats: int | None
) -> RepeatedVerdict:
    """The verdict on attacked images; for a randomised model by passes that the attack has not
    seen.

    An attack selects points that were misclassified in its own passes, partly by chance: only new
    passes estimate the probability of a correct prediction without bias. The margins, by which the
    worst of several attacks is selected, have passes of their own for the same reason. Without
    `repeats` it is the verdict of one pass.
    """
    if repeats is None:
        return judge_repeatedly(logits, y, 1)
    with rng.seed_global(stream.at("verdict")):
        verdict = judge_repeatedly(logits, y, repeats)
    with rng.seed_global(stream.at("margin")):
        margins = judge_repeatedly(logits, y, repeats)
    return replace(verdict, margin=margins.margin, logit_margin=margins.logit_margin)
