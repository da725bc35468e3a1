"""Constants of a classifier over a ball, found by search: estimates from inside, never bounds.

A supremum that was searched for is at most the true one, so radii made of it may be too large. On linear and
quadratic models the constants are known; see the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.core import geometry
from equipoise.core.ascent import ascend
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.local_smoothing import jacobian
from equipoise.local_smoothing.jacobian import dual, softened
from equipoise.local_smoothing.radii import Shape, Steepness

Values = Callable[[Tensor], Tensor]  # images → (B, K): what is mixed, logits or probabilities
ALONG = (0.0, 0.25, 0.5, 0.75)  # points between x and x + δ


def steepness(values: Values, x: Tensor, *, threat: Threat, gamma: float, stream: Stream, steps: int = 10) -> Steepness:
    """M_k and L_k of Theorem 1 over the ball, by projected gradient ascent for every class."""
    ball = _Ball(values, x, threat, stream, steps)

    def bend(at: Tensor) -> Tensor:
        here = ball.gradient(at)
        apart = [ball.size(ball.gradient(ball.centre + share * (at - ball.centre)) - here) for share in ALONG]
        return torch.stack(apart).amax(dim=0) / (1 + gamma * ball.size(here)) / threat.eps

    return Steepness(ball.highest(lambda at: ball.size(ball.gradient(at))), ball.highest(bend), exact=False)


def shape(values: Values, x: Tensor, *, threat: Threat, stream: Stream, steps: int = 10) -> Shape:
    """K_k, m_k, M_k and L_k of Theorem 2 over the ball, by projected gradient ascent for every class."""
    ball = _Ball(values, x, threat, stream, steps)
    start = ball.gradient(ball.centre).detach()

    def quotient(at: Tensor) -> Tensor:
        way = geometry.size(at - ball.centre, threat.norm)
        # At the centre itself the quotient is 0/0; a point so near is of no use and counts nothing.
        near = way < 1e-3 * threat.eps
        found = ball.size(ball.gradient(at) - start) / torch.where(near, 1.0, way)
        return torch.where(near, 0.0, found)

    return Shape(
        high=ball.highest(lambda at: ball.value(at).abs()),
        least=-ball.highest(lambda at: -ball.size(ball.gradient(at))),
        most=ball.highest(lambda at: ball.size(ball.gradient(at))),
        bend=ball.highest(quotient), exact=False)


class _Ball:
    """Every class of every image as a point of its own: (B·K, …)."""

    def __init__(self, values: Values, x: Tensor, threat: Threat, stream: Stream, steps: int) -> None:
        self.values, self.threat, self.steps, self.order = values, threat, steps, dual(threat.norm)
        with torch.no_grad():
            self.classes = values(x[:1]).shape[1]
        self.centre = x.repeat_interleave(self.classes, dim=0)
        self.own = torch.arange(self.classes, device=x.device).repeat(len(x))
        self.start = geometry.draw(x, threat, stream).repeat_interleave(self.classes, dim=0)

    def value(self, at: Tensor) -> Tensor:
        """(B·K,) f_k."""
        return self.values(at).gather(1, self.own.unsqueeze(1)).squeeze(1)

    def gradient(self, at: Tensor) -> Tensor:
        """(B·K, …) ∇f_k, differentiable."""
        found: Any = torch.func.vjp(self.values, at)
        values, pull = found
        one = torch.nn.functional.one_hot(self.own, self.classes).to(values.dtype)
        gradient: Tensor = pull(one)[0]
        return gradient

    def size(self, gradient: Tensor) -> Tensor:
        """(B·K,) in the dual norm."""
        return jacobian.size(gradient, self.order)

    def highest(self, quantity: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, K) the greatest value met on the way up."""

        def softly(at: Tensor) -> Tensor:
            with softened():
                return quantity(at)

        with torch.no_grad():
            best = quantity(self.centre)
        for point in ascend(softly, self.start, norm=self.threat.norm, step_size=2.5 * self.threat.eps / self.steps,
                            steps=self.steps, project=partial(geometry.project, x=self.centre, threat=self.threat)):
            with torch.no_grad():
                best = torch.maximum(best, quantity(point))
        return best.view(-1, self.classes)
