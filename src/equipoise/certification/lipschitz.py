"""Certificates from Lipschitz constants [Bai2024, Theorem 3.5], and estimates of such constants.

A radius from a known constant is a certificate. A constant found by searching a ball is the largest change
that the search has met, so everything computed from it is an estimate and is called one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.certification.bounds import SLACK
from equipoise.certification.radii import lemma_margin
from equipoise.core import checks, geometry
from equipoise.core.ascent import ascend
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def lipschitz_radius(probabilities: Tensor, constants: Tensor, alpha: float) -> Tensor:
    r"""(B,) radius, in double precision, within which the mixture keeps h's class, in the norm of the constants.

    .. math:: \min_{i \ne y} \frac{\alpha (h_y - h_i) + \alpha - 1}{\alpha (L_y + L_i)}

    [Bai2024, Theorem 3.5]; zero where it would be negative. A constant of zero leaves an infinite radius.

    Args:
        probabilities: (B, K) of h.
        constants: (K,) or (B, K) Lipschitz constants of each probability.
        alpha: weight of h, at least 1/2.
    """
    margin = lemma_margin(alpha)
    inside = bool(((probabilities >= 0) & (probabilities <= 1)).all())
    checks.require(inside, "probabilities", "lie in [0, 1]", "logits or NaN")
    checks.require(bool((constants >= 0).all()), "constants", "not be negative", float(constants.min()))
    h = probabilities.double()
    each = constants.to(h).expand_as(h)
    y = h.argmax(dim=1, keepdim=True)
    # AlphaPenalty by more than the error of these few operations, so that no radius is rounded up.
    gap = h.gather(1, y) - h - margin - SLACK
    radius = gap.clamp_min(0) / (each.gather(1, y) + each)
    # 0 / 0: no margin to lose, so no radius either.
    return radius.nan_to_num(nan=0.0, posinf=math.inf).scatter(1, y, math.inf).amin(dim=1)


def gaussian_constant(sigma: float, *, paper: bool = False) -> float:
    """ℓ2 Lipschitz constant of a probability smoothed with N(0, sigma²): 1/(σ·√(2π)), sharp for values in [0, 1].

    The paper's √(2/(π·σ²)) is twice as large, being meant for values in [−1, 1].
    """
    checks.positive("sigma", sigma)
    sharp = 1 / (sigma * math.sqrt(2 * math.pi))
    return 2 * sharp if paper else sharp


@dataclass(frozen=True, eq=False)
class LocalEstimate:
    """What a search of the ball has found: a lower bound of the true constants, hence no certificate."""

    threat: Threat
    probabilities: Tensor  # (B, K) of the clean images
    constants: Tensor  # (B, K) one-sided: how much y may fall and the others rise, per unit of radius

    @property
    def averaged(self) -> Tensor:
        """(B,) mean over the classes [Bai2024, (C.1), with the signs of the text above it]."""
        return self.constants.mean(dim=1)

    @property
    def margins(self) -> Tensor:
        """(B,) estimate of the least lead of the predicted class in the ball, all classes at their worst at once."""
        y = self.probabilities.argmax(dim=1, keepdim=True)
        lead = self.probabilities.gather(1, y) - self.probabilities
        fall = self.threat.eps * (self.constants.gather(1, y) + self.constants)
        return (lead - fall).scatter(1, y, math.inf).amin(dim=1)

    def holds(self, alpha: float) -> Tensor:
        """(B,) estimate of whether the mixture keeps its class at the ball's own radius, the only one searched."""
        radius = lipschitz_radius(self.probabilities, self.constants, alpha)
        return radius >= self.threat.eps * (1 - 1e-6)


def estimate_local(
    model: nn.Module, x: Tensor, *, threat: Threat, stream: Stream, steps: int = 20, restarts: int = 1
) -> LocalEstimate:
    """Estimate each probability's largest change in the ball by projected gradient ascent, class by class.

    For the predicted class y the fall h_y(x) − h_y(x + δ) is raised, for every other class the rise
    h_i(x + δ) − h_i(x) [Bai2024, appendix C.3]; as printed, (C.1) has these signs reversed.

    Args:
        model: images (B, C, H, W) → logits (B, K).
        x: (B, C, H, W) images in [0, 1].
        threat: the ball; the constants are in its norm.
        stream: the chance of these images.
        steps: gradient steps per class and start.
        restarts: starts per class.
    """
    checks.whole("steps", steps, least=1)
    checks.whole("restarts", restarts, least=1)
    with inference(model):
        with torch.no_grad():
            clean = torch.softmax(checks.logits(model(x), len(x)), dim=1)
        y = clean.argmax(dim=1)
        largest = torch.zeros_like(clean)
        for number in range(clean.shape[1]):
            # The predicted class falls, any other rises.
            sign = torch.where(y == number, -1.0, 1.0).to(clean.dtype)
            for restart in range(restarts):
                chance = stream.at("class", number, "start", restart)
                change = _largest_change(model, x, number, sign, clean[:, number], threat, chance, steps)
                largest[:, number] = torch.maximum(largest[:, number], change)
    return LocalEstimate(threat, clean, largest / threat.eps)


def _largest_change(model: nn.Module, x: Tensor, number: int, sign: Tensor, clean: Tensor, threat: Threat,
                    chance: Stream, steps: int) -> Tensor:
    def log_probability(at: Tensor) -> Tensor:
        # The logarithm is raised: the probability itself is flat where it is near 0 or 1.
        return sign * torch.log_softmax(model(at), dim=1)[:, number]

    best = torch.zeros_like(clean)
    for point in ascend(log_probability, geometry.draw(x, threat, chance), norm=threat.norm, steps=steps,
                        step_size=2.5 * threat.eps / steps, project=partial(geometry.project, x=x, threat=threat)):
        with torch.no_grad():
            change = torch.softmax(model(point), dim=1)[:, number] - clean
        best = torch.maximum(best, sign * change)
    return best


@dataclass(frozen=True)
class MarginStatistics:
    """Signed probability margins of the true class on some images: estimates of what Lemma 3.2 needs."""

    mean: float
    median: float
    share_above: float  # share of images whose margin outweighs any accurate classifier at `alpha`
    alpha: float
    n: int


def margin_statistics(margins: Tensor, alpha: float) -> MarginStatistics:
    """Summarise (B,) margins, such as those of attacked images; the attack makes them estimates."""
    checks.require(len(margins) > 0, "margins", "hold at least one image", 0)
    above = margins >= lemma_margin(alpha)
    return MarginStatistics(float(margins.mean()), float(margins.median()), float(above.double().mean()), alpha,
                            len(margins))
