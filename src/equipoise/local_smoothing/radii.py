"""Radii of the two theorems of [Bai2022], within which the class of a smoothed classifier does not
change.

Both are about one radius ε at a time: from constants that hold over the ball of radius ε they
compute a bound, and if it is at least ε, no perturbation of size ε changes the order of two
classes. :func:`largest_radius` tries many radii; each that passes is valid, whatever the result for
smaller ones.

A radius is a *certificate* only if the constants are exact, or bound the true ones. Constants that
were estimated by a search of the ball are at most the true suprema, so that the radius may be too
large: it is an *estimate*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import checks, geometry
from equipoise.core.ascent import ascend
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.local_smoothing.jacobian import SoftplusDerivatives

Values = Callable[[Tensor], Tensor]  # images → (B, K): what is mixed, logits or probabilities


@dataclass(frozen=True)
class Theorem1Constants:
    """Constants of g over a ball, all (B, K)."""

    max_gradient: Tensor  # M_k: sup ‖∇g_k‖
    curvature: Tensor  # L_k: sup ‖∇g_k(x') − ∇g_k(x + δ)‖ / (1 + γ‖∇g_k(x + δ)‖) / ε, x' between x and x + δ
    exact: bool


@dataclass(frozen=True)
class Theorem2Constants:
    """Constants of one side over a ball, all (B, K)."""

    max_value: Tensor  # K_k: sup |f_k|
    min_gradient: Tensor  # m_k: inf ‖∇f_k‖
    max_gradient: Tensor  # M_k: sup ‖∇f_k‖
    curvature: Tensor  # L_k: sup ‖∇f_k(x') − ∇f_k(x)‖ / ‖x' − x‖
    exact: bool


def theorem_1_bound(
    scores: Tensor, g: Tensor, gradient_norms: Tensor, gamma: float, constants: Theorem1Constants
) -> Tensor:
    r"""Theorem 1: the right side of [Bai2022, Eq. (4)], the minimum over all classes but the
    predicted one.

    It needs an oracle in [−1, 1] whose values are constant over the ball: plain votes are within
    :meth:`~equipoise.local_smoothing.neighbours.Neighbours.constant_vote_radius`, votes weighted by
    distance never are. At L = 0 it is |Δ|/b.

    Args:
        scores: (B, K) of the smoothed classifier at x.
        g, gradient_norms: (B, K) g_k(x) and ‖∇g_k(x)‖.
        gamma: γ, finite.
        constants: over the ball.

    Returns:
        (B,) to be compared with the radius of that ball.
    """
    checks.require(0 <= gamma < math.inf, "gamma", "lie in [0, ∞)", gamma)
    curvature, most = constants.curvature, constants.max_gradient
    slope = gamma * curvature * g.abs() / (1 + gamma * gradient_norms) + 2 * gamma * curvature
    gap, b, curve = _pairs(scores, slope + most / (1 + most * gamma), curvature)
    # (√(b² + 4·curve·gap) − b) / (2·curve), rearranged so that it holds at curve = 0.
    bounds = 2 * gap / (torch.sqrt(b.square() + 4 * curve * gap) + b)
    return bounds.scatter(1, scores.argmax(dim=1, keepdim=True), math.inf).amin(dim=1)


def theorem_2_bound(
    scores: Tensor,
    ratio: Tensor,
    gamma: float,
    g: Theorem2Constants,
    h: Theorem2Constants,
    floor: float = 0.0,
) -> Tensor:
    r"""Theorem 2: :math:`|\Delta_{ij}| / \sum_{k \in \{i, j\}} (C^{(1)}_k + \gamma C^{(2)}_k)`, the
    minimum over j.

    Args:
        scores: (B, K) of the smoothed classifier with R_k = ‖∇g_k‖ / (‖∇h_k‖ + floor) at x.
        ratio: (B, K) R_k(x).
        gamma: γ, finite.
        g, h: constants over the ball.
        floor: of the denominator; it only changes m and M of h, the proof is the same.

    Returns:
        As for :func:`theorem_1_bound`; zero where ‖∇h‖ can vanish and there is no floor.
    """
    checks.require(0 <= gamma < math.inf, "gamma", "lie in [0, ∞)", gamma)
    least, most = h.min_gradient + floor, h.max_gradient + floor
    turn = (h.curvature * ratio + g.curvature) / least
    below = (1 + gamma * g.min_gradient / most) * (1 + gamma * ratio)
    first = (
        g.max_gradient * (1 + gamma * g.max_gradient / least) + gamma * g.max_value * turn
    ) / below
    second = (
        g.max_gradient * h.max_gradient / least * (1 + gamma * ratio) + h.max_value * turn
    ) / below
    gap, slope = _pairs(scores, first + gamma * second)
    bounds = torch.nan_to_num(gap / slope, nan=0.0, posinf=math.inf)
    return bounds.scatter(1, scores.argmax(dim=1, keepdim=True), math.inf).amin(dim=1)


def _pairs(scores: Tensor, *values: Tensor) -> list[Tensor]:
    """(B, K) for the predicted class i and every class j: |s_i − s_j|, and the sums of the values
    over {i, j}."""
    predicted = scores.argmax(dim=1, keepdim=True)
    return [
        scores.gather(1, predicted) - scores,
        *(value + value.gather(1, predicted) for value in values),
    ]


@dataclass(frozen=True)
class Radius:
    """(B,) radii; `exact` if they are certificates and not estimates."""

    value: Tensor
    exact: bool


def largest_radius(bound: Callable[[float], tuple[Tensor, bool]], radii: Sequence[float]) -> Radius:
    """(B,) the largest of the radii that the theorem allows, 0 if none.

    `bound` returns, for a radius, the theorem's bound with constants over that ball, and whether
    they are exact.
    """
    checks.require(len(radii) > 0, "radii", "hold at least one", radii)
    best, exact = torch.zeros(()), True
    for radius in sorted(checks.positive("radius", r) for r in radii):
        value, exact_here = bound(radius)
        best, exact = torch.where(value >= radius, radius, best), exact and exact_here
    return Radius(best, exact)


def estimate_theorem_1_constants(
    values: Values, x: Tensor, *, threat: Threat, gamma: float, stream: Stream, steps: int = 10
) -> Theorem1Constants:
    """M_k and L_k of Theorem 1, estimated over the ball by projected gradient ascent for every
    class."""
    ball = _BallSearch(values, x, threat, stream, steps)

    def curvature(at: Tensor) -> Tensor:
        here = ball.gradient(at)
        changes = [
            ball.norm(ball.gradient(ball.centre + share * (at - ball.centre)) - here)
            for share in (0.0, 0.25, 0.5, 0.75)
        ]
        return torch.stack(changes).amax(dim=0) / (1 + gamma * ball.norm(here)) / threat.eps

    return Theorem1Constants(ball.maximum(ball.gradient_norm), ball.maximum(curvature), exact=False)


def estimate_theorem_2_constants(
    values: Values, x: Tensor, *, threat: Threat, stream: Stream, steps: int = 10
) -> Theorem2Constants:
    """K_k, m_k, M_k and L_k of Theorem 2, estimated over the ball by projected gradient ascent for
    every class."""
    ball = _BallSearch(values, x, threat, stream, steps)
    at_centre = ball.gradient(ball.centre).detach()

    def curvature(at: Tensor) -> Tensor:
        distance = geometry.size(at - ball.centre, threat.norm)
        # At the centre itself the quotient is 0/0; points too close to it count as 0.
        near = distance < 1e-3 * threat.eps
        return torch.where(
            near, 0.0, ball.norm(ball.gradient(at) - at_centre) / torch.where(near, 1.0, distance)
        )

    return Theorem2Constants(
        max_value=ball.maximum(
            lambda at: values(at).gather(1, ball.classes.unsqueeze(1)).squeeze(1).abs()
        ),
        min_gradient=-ball.maximum(lambda at: -ball.gradient_norm(at)),
        max_gradient=ball.maximum(ball.gradient_norm),
        curvature=ball.maximum(curvature),
        exact=False,
    )


class _BallSearch:
    """Searches the balls around the images, one search for every class of every image: (B·K, …)."""

    def __init__(
        self, values: Values, x: Tensor, threat: Threat, stream: Stream, steps: int
    ) -> None:
        self.values, self.threat, self.steps = values, threat, steps
        with torch.no_grad():
            self.num_classes = values(x[:1]).shape[1]
        self.centre = x.repeat_interleave(self.num_classes, dim=0)
        self.classes = torch.arange(self.num_classes, device=x.device).repeat(len(x))
        self.start = geometry.draw(x, threat, stream).repeat_interleave(self.num_classes, dim=0)

    def gradient(self, at: Tensor) -> Tensor:
        """(B·K, …) ∇f_k, differentiable."""
        result: Any = torch.func.vjp(self.values, at)
        values, vjp = result
        gradient: Tensor = vjp(F.one_hot(self.classes, self.num_classes).to(values.dtype))[0]
        return gradient

    def norm(self, gradient: Tensor) -> Tensor:
        """(B·K,) in the dual norm."""
        return geometry.dual_norm(gradient, self.threat.norm)

    def gradient_norm(self, at: Tensor) -> Tensor:
        """(B·K,) ‖∇f_k‖."""
        return self.norm(self.gradient(at))

    def maximum(self, quantity: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, K) the largest value along the ascent."""

        def smooth_quantity(at: Tensor) -> Tensor:
            with SoftplusDerivatives():
                return quantity(at)

        with torch.no_grad():
            best = quantity(self.centre)
        step_size = 2.5 * self.threat.eps / self.steps
        for point in ascend(
            smooth_quantity,
            self.start,
            norm=self.threat.norm,
            step_size=step_size,
            steps=self.steps,
            project=partial(geometry.project, x=self.centre, threat=self.threat),
        ):
            with torch.no_grad():
                best = torch.maximum(best, quantity(point))
        return best.view(-1, self.num_classes)
