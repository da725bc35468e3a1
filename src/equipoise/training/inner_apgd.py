"""Auto-PGD inside training: every image at its own radius, nothing left out, nothing that makes a GPU wait.

:mod:`equipoise.attacks.apgd` drops images that are broken and knows one radius, as an evaluation should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.attacks.apgd import MOMENTUM, RHO, checkpoints
from equipoise.attacks.engine import step_towards
from equipoise.core import geometry
from equipoise.core.ascent import ValueAndGradient
from equipoise.core.geometry import per_example, project_to_ball


def auto_ascend(slope: ValueAndGradient, x: Tensor, start: Tensor, *, norm: str, eps: Tensor, steps: int) -> Tensor:
    """The iterate with the highest loss; steps begin at 2·eps and halve as in [Croce2020].

    Args:
        slope: of the loss that is raised; the caller has put the model into inference mode.
        x: (B, …) centres of the balls.
        start: (B, …) first iterate.
        norm: linf or l2.
        eps: (B,) radii.
        steps: number of steps.

    Returns:
        (B, …), detached.
    """
    stride, due = 2 * eps, checkpoints(steps)
    point = previous = best = start.detach()
    best_value = last = mark = eps.new_full(eps.shape, -torch.inf)
    rises, halved = torch.zeros_like(eps), torch.ones_like(eps, dtype=torch.bool)
    best_gradient = torch.zeros_like(x)
    for number in range(steps + 1):
        value, gradient = slope(point)
        rises = rises + (value > last) * (number > 0)
        better = value > best_value
        best, best_gradient = step_towards(better, point, best), step_towards(better, gradient, best_gradient)
        best_value, last = torch.maximum(value, best_value), value
        if number == 0:
            mark = value
        if number == steps:
            break
        if number in due:
            halve = (rises <= RHO * due[number]) | (~halved & (mark >= best_value))
            stride, halved, mark, rises = torch.where(halve, stride / 2, stride), halve, best_value, rises * 0
            point, gradient = step_towards(halve, best, point), step_towards(halve, best_gradient, gradient)
        share = MOMENTUM if number else 1.0
        move = per_example(stride, x) * geometry.steepest(gradient, norm)
        aimed = project_to_ball(point + move, x, norm, eps)
        mixed = point + share * (aimed - point) + (1 - share) * (point - previous)
        previous, point = point, project_to_ball(mixed, x, norm, eps)
    return best
