"""The PGD adversary inside training: a fixed number of steps for every image, at a radius of its own.

The PGD attack skips images that are already broken and keeps the best iterate, as an evaluation should. Training
wants the last iterate of every image, and nothing that makes a GPU wait for the host.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from equipoise.core import geometry
from equipoise.core.ascent import Objective, ascend


def inner_pgd(objective: Objective, x: Tensor, start: Tensor, *, norm: str, eps: float | Tensor | None,
              step_size: float | Tensor, steps: int) -> list[Tensor]:
    """All steps + 1 iterates from `start` on; see :func:`~equipoise.core.ascent.ascend`.

    Args:
        objective: images (B, …) → (B,), raised per image.
        x: (B, …) centres of the balls.
        start: (B, …) first iterate.
        norm: linf or l2.
        eps: radius, or (B,) radii; None is no ball, only [0, 1].
        step_size: length of a step in the norm, or (B,) lengths.
        steps: number of steps.
    """
    project = partial(geometry.project_to_ball, x=x, norm=norm, eps=eps)
    return list(ascend(objective, start, norm=norm, step_size=step_size, steps=steps, project=project))
