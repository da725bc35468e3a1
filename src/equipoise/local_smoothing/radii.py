"""Radii of the two theorems of [Bai2022]: how far the answer of a smoothed classifier stays.

Both theorems speak of one radius ε at a time: with constants that hold over the ball of radius ε, they give a
number, and if it is at least ε, no perturbation of size ε changes the order of two classes. :func:`largest` tries
many radii; a passed one is valid by itself, whatever the smaller ones say.

A radius is a *certificate* only where the constants are exact, or bound the true ones; with constants found by
search it is an *estimate*, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks


@dataclass(frozen=True)
class Radius:
    """(B,) radii, and what they are worth."""

    value: Tensor
    exact: bool

    @property
    def kind(self) -> str:
        """`certificate` or `estimate`."""
        return "certificate" if self.exact else "estimate"


@dataclass(frozen=True)
class Steepness:
    """Constants of g over a ball for Theorem 1, all (B, K)."""

    most: Tensor  # M_k: sup ‖∇g_k‖
    bend: Tensor  # L_k: sup ‖∇g_k(x') − ∇g_k(x + δ)‖ / (1 + γ‖∇g_k(x + δ)‖) / ε, x' between x and x + δ
    exact: bool


@dataclass(frozen=True)
class Shape:
    """Constants of one side over a ball for Theorem 2, all (B, K)."""

    high: Tensor  # K_k: sup |f_k|
    least: Tensor  # m_k: inf ‖∇f_k‖
    most: Tensor  # M_k: sup ‖∇f_k‖
    bend: Tensor  # L_k: sup ‖∇f_k(x') − ∇f_k(x)‖ / ‖x' − x‖
    exact: bool


def neighbours_bound(scores: Tensor, g: Tensor, size: Tensor, gamma: float, over: Steepness) -> Tensor:
    r"""Theorem 1: the right side of [Bai2022, Eq. (4)], the least over all classes but the answered one.

    It needs an oracle in [−1, 1] whose values stay the same over the ball: plain votes do within
    :meth:`~equipoise.local_smoothing.neighbours.Neighbours.steady`, votes weighted by distance never do. At L = 0 it reads
    |Δ|/b.

    Args:
        scores: (B, K) of the smoothed classifier at x.
        g, size: (B, K) g_k(x) and ‖∇g_k(x)‖.
        gamma: γ, finite.
        over: constants over the ball.

    Returns:
        (B,) compare it with the radius of that ball.
    """
    _finite(gamma)
    slope = gamma * over.bend * g.abs() / (1 + gamma * size) + 2 * gamma * over.bend
    b = _pairs(scores, slope + over.most / (1 + over.most * gamma))
    curve, gap = _pairs(scores, over.bend), _gap(scores)
    # (√(b² + 4·curve·gap) − b) / (2·curve), multiplied out so that it holds at curve = 0.
    found = 2 * gap / (torch.sqrt(b.square() + 4 * curve * gap) + b)
    return _least(scores, found)


def robust_bound(scores: Tensor, ratio: Tensor, gamma: float, g: Shape, h: Shape, floor: float = 0.0) -> Tensor:
    r"""Theorem 2: :math:`|\Delta_{ij}| / \sum_{k \in \{i, j\}} (C^{(1)}_k + \gamma C^{(2)}_k)`, least over j.

    Args:
        scores: (B, K) of the smoothed classifier with R_k = ‖∇g_k‖ / (‖∇h_k‖ + floor) at x.
        ratio: (B, K) R_k(x).
        gamma: γ, finite.
        g, h: constants over the ball.
        floor: of the denominator; it only moves m and M of h, the proof is unchanged.

    Returns:
        (B,) compare it with the radius of that ball; zero where ‖∇h‖ can vanish and there is no floor.
    """
    _finite(gamma)
    least, most = h.least + floor, h.most + floor
    turn = (h.bend * ratio + g.bend) / least
    below = (1 + gamma * g.least / most) * (1 + gamma * ratio)
    first = (g.most * (1 + gamma * g.most / least) + gamma * g.high * turn) / below
    second = (g.most * h.most / least * (1 + gamma * ratio) + h.high * turn) / below
    found = _gap(scores) / _pairs(scores, first + gamma * second)
    return _least(scores, torch.nan_to_num(found, nan=0.0, posinf=math.inf))


def largest(bound: Callable[[float], tuple[Tensor, bool]], radii: Sequence[float]) -> Radius:
    """(B,) the largest of the radii that the theorem allows, 0 if none.

    Args:
        bound: radius → what the theorem gives with constants over that ball, and whether they are exact.
        radii: to be tried.
    """
    checks.require(len(radii) > 0, "radii", "hold at least one", radii)
    best, exact = torch.zeros(()), True
    for radius in sorted(checks.positive("radius", r) for r in radii):
        value, sure = bound(radius)
        best, exact = torch.where(value >= radius, radius, best), exact and sure
    return Radius(best, exact)


def _finite(gamma: float) -> None:
    checks.require(0 <= gamma < math.inf, "gamma", "lie in [0, ∞)", gamma)


def _gap(scores: Tensor) -> Tensor:
    """(B, K) |s_i − s_j| to the answered class i."""
    return scores.amax(dim=1, keepdim=True) - scores


def _pairs(scores: Tensor, each: Tensor) -> Tensor:
    """(B, K) the sum over k in {i, j}, i being the answered class."""
    return each + each.gather(1, scores.argmax(dim=1, keepdim=True))


def _least(scores: Tensor, found: Tensor) -> Tensor:
    return found.scatter(1, scores.argmax(dim=1, keepdim=True), math.inf).amin(dim=1)
