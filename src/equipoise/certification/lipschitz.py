"""Certificates from Lipschitz constants [Bai2024, Theorem 3.5], and estimates of such constants.

A radius from a known constant is a certificate. A constant estimated by searching a ball is the
largest change that the search met, so everything computed from it is an estimate and is called one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.certification.radii import SLACK, lemma_margin
from equipoise.core import checks, geometry
from equipoise.core.ascent import ascend, last
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

CLASSES_PER_PASS = {"cpu": 1, "cuda": 10}  # passes over one class at a time would leave a GPU idle


def lipschitz_radius(probabilities: Tensor, constants: Tensor, alpha: float) -> Tensor:
    r"""(B,) radius, in double precision, within which the mixture keeps h's class, in the norm of
    the constants.

    .. math:: \min_{i \ne y} \frac{\alpha (h_y - h_i) + \alpha - 1}{\alpha (L_y + L_i)}

    [Bai2024, Theorem 3.5]; zero where it would be negative. A constant of zero gives an infinite
    radius. A probability smoothed with N(0, σ²I) has the ℓ2 constant 1/(σ·√(2π)), which is sharp.
    `probabilities` are those of h (B, K), with Lipschitz constants (K,) or (B, K); alpha, the
    weight of h, is at least 1/2.
    """
    margin = lemma_margin(alpha)
    inside = bool(((probabilities >= 0) & (probabilities <= 1)).all())
    checks.require(inside, "probabilities", "lie in [0, 1]", "logits or NaN")
    checks.require(
        bool((constants >= 0).all()), "constants", "not be negative", float(constants.min())
    )
    h = probabilities.double()
    constant = constants.to(h).expand_as(h)
    y = h.argmax(dim=1, keepdim=True)
    # Reduced by more than the error of these few operations, so that no radius is rounded up.
    gap = h.gather(1, y) - h - margin - SLACK
    radius = gap.clamp_min(0) / (constant.gather(1, y) + constant)
    # 0 / 0: no margin to lose, so no radius either.
    return radius.nan_to_num(nan=0.0, posinf=math.inf).scatter(1, y, math.inf).amin(dim=1)


@dataclass(frozen=True, eq=False)
class LocalEstimate:
    """Result of searching the ball: lower bounds of the true constants, hence no certificate."""

    threat: Threat
    probabilities: Tensor  # (B, K) of the clean images
    constants: Tensor  # (B, K) one-sided: fall of y's and rise of the others' probability, per unit of radius

    @property
    def averaged(self) -> Tensor:
        """(B,) mean over the classes [Bai2024, (C.1), with the signs of the text above it]."""
        return self.constants.mean(dim=1)

    @property
    def margins(self) -> Tensor:
        """(B,) estimated smallest margin of the predicted class in the ball, all classes at their
        worst at once."""
        y = self.probabilities.argmax(dim=1, keepdim=True)
        margin = self.probabilities.gather(1, y) - self.probabilities
        fall = self.threat.eps * (self.constants.gather(1, y) + self.constants)
        return (margin - fall).scatter(1, y, math.inf).amin(dim=1)


def estimate_local(
    model: nn.Module,
    x: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    steps: int = 20,
    restarts: int = 1,
) -> LocalEstimate:
    """Estimate each probability's largest change in the ball by projected gradient ascent, class by
    class.

    For the predicted class y the fall h_y(x) − h_y(x + δ) is maximised, for every other class the
    rise h_i(x + δ) − h_i(x) [Bai2024, appendix C.3]; as printed, (C.1) has these signs reversed.

    The constants are in the norm of `threat`; `steps` and `restarts` are per class.
    """
    checks.whole("steps", steps, least=1)
    checks.whole("restarts", restarts, least=1)
    with inference(model):
        with torch.no_grad():
            clean = torch.softmax(checks.logits(model(x), len(x)), dim=1)
        largest = torch.zeros_like(clean)
        for labels in torch.arange(clean.shape[1]).split(CLASSES_PER_PASS.get(x.device.type, 1)):
            for restart in range(restarts):
                starts = [
                    geometry.draw(x, threat, stream.at("class", label, "start", restart))
                    for label in labels.tolist()
                ]
                change = _largest_changes(
                    model, x, torch.stack(starts), labels.to(x.device), clean, threat, steps
                )
                largest[:, labels] = torch.maximum(largest[:, labels], change)
    return LocalEstimate(threat, clean, largest / threat.eps)


def _largest_changes(
    model: nn.Module,
    x: Tensor,
    starts: Tensor,
    labels: Tensor,
    clean: Tensor,
    threat: Threat,
    steps: int,
) -> Tensor:
    """(B, R) largest fall (of the predicted class) or rise of the probabilities of `labels` (R,).

    The search of every label has a start of its own, `starts` (R, B, …); all share their passes.
    """
    label = labels.repeat_interleave(len(x))
    before = clean[:, labels].T.flatten()
    sign = torch.where(clean.argmax(dim=1).repeat(len(labels)) == label, -1.0, 1.0).to(clean.dtype)
    best = torch.zeros_like(before)

    def log_probability(at: Tensor) -> Tensor:
        nonlocal best
        # The logarithm, because the probability itself is flat where it is near 0 or 1.
        logarithm = torch.log_softmax(model(at), dim=1).gather(1, label[:, None])[:, 0]
        best = torch.maximum(best, sign * (logarithm.detach().exp() - before))
        return sign * logarithm

    images = x.repeat(len(labels), *(1 for _ in x.shape[1:]))
    end = last(
        ascend(
            log_probability,
            starts.flatten(0, 1),
            norm=threat.norm,
            steps=steps,
            step_size=2.5 * threat.eps / steps,
            project=partial(geometry.project, x=images, threat=threat),
        )
    )
    with torch.no_grad():
        log_probability(end)
    return best.view(len(labels), len(x)).T
