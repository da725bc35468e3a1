r"""Projected gradient ascent [Madry2018]: the plain attack that everything else is compared with.

.. math:: x \leftarrow \Pi\big(x + s \cdot \mathrm{steepest}(\nabla_x \ell(f(x), y))\big)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.attacks.batch_attacks import BatchAttack
from equipoise.attacks.gradients import Extra
from equipoise.attacks.randomized import judge_repeatedly
from equipoise.core import checks, geometry, losses
from equipoise.core.ascent import ascend, last
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class Pgd(BatchAttack):
    """Maximise a loss over the ball, and keep what fools the model, or else what comes nearest to
    it.

    Args:
        steps: gradient steps per start.
        step_size: of one step in the norm of the threat; 2.5·eps/steps if not given.
        restarts: starts per image; images already broken are left out of later ones, unless the
            model is randomised.
        loss: ce, dlr or margin (of probabilities).
    """

    name: ClassVar[str] = "pgd"
    steps: int = 20
    step_size: float | None = None
    restarts: int = 1
    loss: str = "ce"

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.whole("restarts", self.restarts, least=1, most=1000)
        checks.one_of("loss", self.loss, losses.LOSSES)
        if self.step_size is not None:
            checks.positive("step_size", self.step_size)

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """Attack images that survived the starts before."""
        step_size = 2.5 * threat.eps / self.steps if self.step_size is None else self.step_size
        source = model if self.surrogate is None else self.surrogate
        best, margin = x.clone(), _margin(model, x, y, self.repeats)
        for restart in range(self.restarts):
            rows = ((margin >= 0) | (self.repeats is not None)).nonzero().squeeze(1)
            if len(rows) == 0:
                break
            labels, start = y[rows], stream[rows].at("start", restart)
            x_adv = _ascend(
                source,
                x[rows],
                labels,
                threat,
                start,
                self.steps,
                step_size,
                self.loss,
                self.extra,
                self.eot,
            )
            reached = _margin(model, x_adv, labels, self.repeats)
            nearer = reached < margin[rows]
            best[rows[nearer]], margin[rows[nearer]] = x_adv[nearer], reached[nearer]
        return best


@dataclass(frozen=True)
class TransferPgd(BatchAttack):
    """PGD on `source` alone: the model is never queried, so the last step of every image serves
    against any model."""

    name: ClassVar[str] = "transfer-pgd"
    source: nn.Module
    steps: int = 20
    loss: str = "ce"

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, least=1, most=checks.MAX_STEPS)
        checks.one_of("loss", self.loss, losses.LOSSES)

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """Attack `source`."""
        with inference(self.source):
            return _ascend(
                self.source,
                x,
                y,
                threat,
                stream.at("start", 0),
                self.steps,
                2.5 * threat.eps / self.steps,
                self.loss,
                None,
            )


def _ascend(
    source: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    stream: Stream,
    steps: int,
    step_size: float,
    loss: str,
    extra: Extra | None,
    eot: int | None = None,
) -> Tensor:
    """The last iterate from a random start."""

    def objective(point: Tensor) -> Tensor:
        value = torch.stack([losses.LOSSES[loss](source(point), y) for _ in range(eot or 1)]).mean(
            dim=0
        )
        return value if extra is None else value + extra(point)

    return last(
        ascend(
            objective,
            geometry.draw(x, threat, stream),
            norm=threat.norm,
            step_size=step_size,
            steps=steps,
            project=partial(geometry.project, x=x, threat=threat),
        )
    )


@torch.no_grad()
def _margin(model: nn.Module, x: Tensor, y: Tensor, repeats: int | None) -> Tensor:
    def logits() -> Tensor:
        z = checks.logits(model(x), len(x), f"logits of the model {type(model).__name__}")
        checks.labels(y, z.shape[1], len(x))
        return z

    return (
        losses.signed_margin(logits(), y)
        if repeats is None
        else judge_repeatedly(logits, y, repeats).margin
    )
