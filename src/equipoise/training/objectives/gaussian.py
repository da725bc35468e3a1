"""Training under Gaussian noise [Cohen2019]: the plain way to a classifier that can be smoothed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training import noise
from equipoise.training.objective import Memory, Objective, ObjectiveOutput, cross_entropy, right

JUDGED_BY_NOISES = 8


@dataclass(frozen=True, kw_only=True)
class SmoothingObjective(Objective):
    """What all objectives for randomized smoothing share: the noise, and being judged under it."""

    sigma: float = setting(0.5, "Standard deviation of the noise, in [0, 1] pixels.", fraction=True)

    def judge(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream) -> dict[str, Tensor]:
        """Clean, and by the probabilities averaged over eight noises."""
        z = noise.logits(model, x, noise.draw(x, self.sigma, JUDGED_BY_NOISES, stream))
        return {"clean": right(model(x), y), "noisy": right(noise.log_average(z), y)}


def mean_cross_entropy(z: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B, S, K) logits → (B,): cross-entropy, averaged over the noises."""
    count, noises, _ = z.shape
    repeated = y.unsqueeze(1).expand(count, noises).flatten()
    return cross_entropy(z.flatten(0, 1), repeated, smoothing).view(count, noises).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class Gaussian(SmoothingObjective):
    r"""Cross-entropy under noise: :math:`\frac1m \sum_i \ell(f(x + \delta_i), y)` [SmoothMix, (4)].

    One noise per image, m = 1, in [Cohen2019].
    """

    noises: int = setting(1, "Noises per image, m.", least=1)
    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", share=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        """See :class:`Objective`."""
        z = noise.logits(model, x, noise.draw(x, self.sigma, self.noises, stream))
        with torch.no_grad():
            correct = right(noise.log_average(z), y)
        return ObjectiveOutput(mean_cross_entropy(z, y, self.label_smoothing), correct)
