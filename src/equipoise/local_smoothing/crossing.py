"""Attacks with a target strength γ_t other than the one in use, and the strength where the
accuracies of g and h cross.

Under an attack on g the robust side is correct, under one on h the accurate side is: as γ_t rises,
their accuracies cross [Bai2022, Figure 4]. The policy is trained with the crossing γ_0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equipoise.core import checks, geometry, losses, rng
from equipoise.core.ascent import ascend, last
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.local_smoothing.smoothing import SmoothedClassifier, log_strength

RESAMPLES = 1000


def attack_at_strengths(
    smoothed: SmoothedClassifier,
    x: Tensor,
    y: Tensor,
    gammas: Sequence[float],
    *,
    threat: Threat,
    steps: int = 10,
    step_size: float | None = None,
    loss: losses.Loss = losses.cross_entropy,
    batch_size: int | None = None,
) -> Tensor:
    r"""Attack every image once per target strength, all in one call [Bai2022, Eq. (6)].

    .. math:: x \leftarrow \Pi\big(x + s \cdot \mathrm{steepest}(\nabla_x \ell(g^{\gamma_t}(x),
    y))\big)

    As in the paper it starts at the image and returns the last iterate, whatever the classifier in
    use, whose strength may be another, predicts.

    Args:
        smoothed: the rule; its own strength is not used.
        x, y: (B, C, H, W) images in [0, 1] and (B,) labels.
        gammas: T target strengths; 0 attacks g, ∞ attacks h.
        threat, steps, loss: of the attack.
        step_size: of one step; 2.5·eps/steps if not given.
        batch_size: pairs of image and target at a time; all if not given.

    Returns:
        (T, B, C, H, W), detached.
    """
    checks.whole("steps", steps, least=1)
    checks.require(len(gammas) > 0, "gammas", "hold at least one", gammas)
    step_size = (
        2.5 * threat.eps / steps if step_size is None else checks.positive("step_size", step_size)
    )
    gates = (
        log_strength(torch.tensor(gammas, dtype=torch.float64))
        .to(x.device)
        .repeat_interleave(len(x))
    )
    results = []
    with inference(smoothed):
        for rows in torch.arange(len(gates), device=x.device).split(
            batch_size or max(len(gates), 1)
        ):
            images = rows % len(x)
            start, labels, gate = x[images], y[images], gates[rows]
            iterates = ascend(
                lambda at, g=gate, t=labels: loss(smoothed.forward_with_gate(at, g), t),  # type: ignore[misc]
                start,
                norm=threat.norm,
                step_size=step_size,
                steps=steps,
                project=partial(geometry.project, x=start, threat=threat),
            )
            results.append(last(iterates))
    return torch.cat(results).view(len(gammas), *x.shape)


@dataclass(frozen=True)
class Crossing:
    """Where g overtakes h, with a bootstrap interval; `exists` is false where they never cross."""

    gamma: float
    low: float
    high: float
    exists: bool


def find_crossing(
    gammas: Sequence[float],
    accurate: Tensor,
    robust: Tensor,
    *,
    seed: int = 0,
    confidence: float = 0.95,
) -> Crossing:
    """γ_0: the target strength below which h is more accurate under attack, and above which g is.

    Between two targets the difference of the accuracies is interpolated linearly in log γ. Where it
    never rises through zero, γ_0 is the last target (h is more accurate there) or the first; 0 and
    ∞ count as one grid step beyond their neighbours. Where it rises through zero more than once,
    γ_0 is the last such point.

    Args:
        gammas: T targets in rising order, at least two of them positive and finite.
        accurate, robust: (T, N) bool: whether g and h classify image n correctly when attacked at
            target t.
        seed, confidence: random seed of the resampling, and confidence of the interval.
    """
    finite = [t for t, gamma in enumerate(gammas) if 0 < gamma < math.inf]
    checks.require(
        len(finite) >= 2 and list(gammas) == sorted(gammas),
        "gammas",
        "rise and hold two that are positive and finite",
        gammas,
    )
    logs = {t: math.log(gammas[t]) for t in finite}
    first, final = logs[finite[0]], logs[finite[-1]]
    step = (final - first) / (len(finite) - 1)
    gates = [
        logs.get(t, first - step if gamma == 0 else final + step) for t, gamma in enumerate(gammas)
    ]
    difference = accurate.double() - robust.double()
    point, exists = _last_crossing(gates, difference.mean(dim=1))
    n = difference.shape[1]
    draws = (
        rng.stream(seed, "crossing", torch.arange(RESAMPLES)).integers(n, n).to(difference.device)
    )
    resampled = sorted(_last_crossing(gates, difference[:, rows].mean(dim=1))[0] for rows in draws)
    tail = (1 - confidence) / 2
    low, high = (
        resampled[int(tail * RESAMPLES)],
        resampled[min(int((1 - tail) * RESAMPLES), RESAMPLES - 1)],
    )
    return Crossing(math.exp(point), math.exp(low), math.exp(high), exists)


def _last_crossing(gates: Sequence[float], difference: Tensor) -> tuple[float, bool]:
    """The last point where the difference rises from below zero to zero or above, and whether there
    is one."""
    d = difference.tolist()
    for t in range(len(d) - 1, 0, -1):
        if d[t - 1] < 0 <= d[t]:
            fraction = -d[t - 1] / (d[t] - d[t - 1])
            return gates[t - 1] + fraction * (gates[t] - gates[t - 1]), True
    return (gates[-1] if d[-1] < 0 else gates[0]), False
