"""The adversary inside training: a fixed number of steps, the same for every image.

:func:`equipoise.attacks.pgd` leaves out images that are already broken and keeps the best iterate, as an
evaluation should. Training wants the last iterate of every image, at a radius that may change with time or
from image to image, and nothing that makes a GPU wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise import geometry
from equipoise.geometry import per_example

Slope = Callable[[Tensor], tuple[Tensor, ...]]  # images (B, …) → (B,) a loss, and its gradient by the images


def sloped(loss: Callable[[Tensor], Tensor]) -> Slope:
    """The slope of a loss, images (B, …) → (B,)."""

    def slope(at: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            here = at.detach().requires_grad_()
            value = loss(here)
            return value.detach(), torch.autograd.grad(value.sum(), here)[0]

    return slope


def ascend(loss: Callable[[Tensor], Tensor], x: Tensor, start: Tensor, *, norm: str, eps: float | Tensor | None,
           step_size: float | Tensor, steps: int) -> list[Tensor]:
    r"""Gradient ascent from `start`: :math:`x_{t+1} = \Pi(x_t + s \cdot \mathrm{steepest}(\nabla \ell(x_t)))`.

    The caller puts the model into the mode it is attacked in (:func:`equipoise.modes.inference`: evaluation
    mode, parameters frozen, as the official implementations have it).

    Args:
        loss: images (B, …) → (B,), raised per image.
        x: (B, …) centres of the balls.
        start: (B, …) first iterate.
        norm: linf or l2.
        eps: radius, or (B,) radii; None is no ball, only [0, 1].
        step_size: length of a step in the norm, or (B,) lengths.
        steps: number of steps.

    Returns:
        steps + 1 iterates, detached; the first is `start`.
    """
    iterates, slope = [start.detach()], sloped(loss)
    for _ in range(steps):
        here = iterates[-1]
        move = _spread(step_size, x) * geometry.steepest(slope(here)[1], norm)
        iterates.append(within(here + move, x, norm, eps))
    return iterates


def within(x_adv: Tensor, x: Tensor, norm: str, eps: float | Tensor | None) -> Tensor:
    """Back into [0, 1], then into the ball around x: x is in the box, so that shrinking towards it stays there."""
    x_adv = x_adv.clamp(0, 1)
    if eps is None:
        return x_adv
    delta, radius = x_adv - x, _spread(eps, x)
    if norm == "linf":
        return (x + torch.clamp(delta, min=-radius, max=radius)).clamp(0, 1)  # type: ignore[arg-type]
    length = per_example(geometry.size(delta, "l2"), delta)
    return (x + delta * (radius / length.clamp_min(radius).clamp_min(1e-12))).clamp(0, 1)


def _spread(value: float | Tensor, x: Tensor) -> float | Tensor:
    return per_example(value, x) if isinstance(value, Tensor) else value
