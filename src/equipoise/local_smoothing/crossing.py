"""Attacks that aim at another strength than the one in use, and where the two bases change places under them.

Against an attack on g the robust side is right, against one on h the accurate side is: as the strength γ_t at which
the attack aims rises, their accuracies cross [Bai2022, Figure 4]. The crossing γ_0 is what the policy learns by.
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
from equipoise.local_smoothing.smoothing import SmoothedClassifier, gate_of

RESAMPLES = 1000


def aimed(
    smoothed: SmoothedClassifier, x: Tensor, y: Tensor, gammas: Sequence[float], *, threat: Threat, steps: int = 10,
    step_size: float | None = None, loss: losses.Loss = losses.cross_entropy, batch_size: int | None = None,
) -> Tensor:
    r"""Attack every image once per target strength, all in one call [Bai2022, Eq. (6)].

    .. math:: x \leftarrow \Pi\big(x + s \cdot \mathrm{steepest}(\nabla_x \ell(g^{\gamma_t}(x), y))\big)

    As in the paper it starts at the image and its last iterate is kept: nobody asks the attacked classifier, whose
    own strength may be another. γ_t = 0 attacks g, γ_t = ∞ attacks h.

    Args:
        smoothed: the rule; its own strength does not matter.
        x, y: (B, C, H, W) images in [0, 1] and (B,) labels.
        gammas: T targets.
        threat: the ball.
        steps: gradient steps.
        step_size: of one step; 2.5·eps/steps if not given.
        loss: raised per example.
        batch_size: pairs of image and target at a time; all if not given.

    Returns:
        (T, B, C, H, W), detached.
    """
    checks.whole("steps", steps, least=1)
    checks.require(len(gammas) > 0, "gammas", "hold at least one", gammas)
    stride = 2.5 * threat.eps / steps if step_size is None else checks.positive("step_size", step_size)
    gates = gate_of(torch.tensor(gammas, dtype=torch.float64)).to(x.device).repeat_interleave(len(x))
    count = len(gates)
    found = []
    with inference(smoothed):
        for rows in torch.arange(count, device=x.device).split(batch_size or max(count, 1)):
            own = rows % len(x)
            start, labels, gate = x[own], y[own], gates[rows]
            iterates = ascend(lambda at, g=gate, t=labels: loss(smoothed.mixed(at, g), t),  # type: ignore[misc]
                              start, norm=threat.norm, step_size=stride, steps=steps,
                              project=partial(geometry.project, x=start, threat=threat))
            found.append(last(iterates))
    return torch.cat(found).view(len(gammas), *x.shape)


@dataclass(frozen=True)
class Crossing:
    """Where g overtakes h, with an interval from resampled images; `met` is false where they never cross."""

    gamma: float
    low: float
    high: float
    met: bool

    @property
    def beta(self) -> float:
        """β_0 = log γ_0."""
        return math.log(self.gamma)


def crossing(gammas: Sequence[float], accurate: Tensor, robust: Tensor, *, seed: int = 0,
             confidence: float = 0.95) -> Crossing:
    """γ_0: the strength up to which attacks leave h the better, and beyond which g.

    Between two targets the difference of the accuracies is a straight line in log γ. Where it never rises
    through zero, γ_0 is the last target (h is better there) or the first; 0 and ∞ stand one step of the grid beyond
    their neighbours. Where it does so more than once, γ_0 is the last such place.

    Args:
        gammas: T targets in rising order, at least two of them positive and finite.
        accurate, robust: (T, N) bool: image n, attacked at target t, answered rightly by g and by h.
        seed: of the resampling.
        confidence: of the interval.
    """
    finite = [t for t, gamma in enumerate(gammas) if 0 < gamma < math.inf]
    checks.require(len(finite) >= 2 and list(gammas) == sorted(gammas), "gammas",
                   "rise and hold two that are positive and finite", gammas)
    gates = _places(gammas, finite)
    ahead = accurate.double() - robust.double()
    point, met = _meet(gates, ahead.mean(dim=1))
    n = ahead.shape[1]
    draws = rng.stream(seed, "crossing", torch.arange(RESAMPLES)).integers(n, n).to(ahead.device)
    again = sorted(_meet(gates, ahead[:, rows].mean(dim=1))[0] for rows in draws)
    tail = (1 - confidence) / 2
    low, high = again[int(tail * RESAMPLES)], again[min(int((1 - tail) * RESAMPLES), RESAMPLES - 1)]
    return Crossing(math.exp(point), math.exp(low), math.exp(high), met)


def _places(gammas: Sequence[float], finite: Sequence[int]) -> list[float]:
    """log γ, the ends 0 and ∞ one step of the grid beyond their neighbours."""
    logs = {t: math.log(gammas[t]) for t in finite}
    step = (logs[finite[-1]] - logs[finite[0]]) / (len(finite) - 1)
    return [logs[t] if t in logs else logs[finite[0]] - step if gammas[t] == 0 else logs[finite[-1]] + step
            for t in range(len(gammas))]


def _meet(gates: Sequence[float], ahead: Tensor) -> tuple[float, bool]:
    """The last place where the difference goes from below zero to zero or above, and whether there is one."""
    d = ahead.tolist()
    for t in range(len(d) - 1, 0, -1):
        if d[t - 1] < 0 <= d[t]:
            share = -d[t - 1] / (d[t] - d[t - 1])
            return gates[t - 1] + share * (gates[t] - gates[t - 1]), True
    return (gates[-1] if d[-1] < 0 else gates[0]), False
