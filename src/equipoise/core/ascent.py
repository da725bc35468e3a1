"""Projected gradient ascent: the one loop behind PGD attacks, adversarial training and searches of
a ball."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equipoise.core import geometry

Objective = Callable[[Tensor], Tensor]  # images (B, …) → (B,), raised per image
ValueAndGradient = Callable[
    [Tensor], tuple[Tensor, ...]
]  # images (B, …) → (B,) values, (B, …) gradients


def value_and_gradient(objective: Objective) -> ValueAndGradient:
    """The objective with its gradient by the images; an objective without one has gradient zero."""

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            value = objective(point)
            gradient = (
                torch.autograd.grad(value.sum(), point, allow_unused=True)[0]
                if value.requires_grad
                else None
            )
        return value.detach(), torch.zeros_like(x) if gradient is None else torch.nan_to_num(
            gradient
        )

    return evaluate


def ascend(
    objective: Objective,
    start: Tensor,
    *,
    norm: str,
    step_size: float | Tensor,
    steps: int,
    project: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """Projected gradient ascent on an objective; see :func:`follow_gradient`."""
    return follow_gradient(
        value_and_gradient(objective),
        start,
        norm=norm,
        step_size=step_size,
        steps=steps,
        project=project,
    )


def follow_gradient(
    evaluate: ValueAndGradient,
    start: Tensor,
    *,
    norm: str,
    step_size: float | Tensor,
    steps: int,
    project: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    r"""Yield `start` and every iterate of :math:`x_{t+1} = \Pi(x_t + s \cdot
    \mathrm{steepest}(\nabla \ell(x_t)))`.

    The caller puts the model into the mode it is attacked in
    (:func:`equipoise.core.modes.inference`).

    `step_size` is the length s of a step in the norm, or (B,) lengths; `project` is Π, such as
    :func:`equipoise.core.geometry.project` around the clean images. The steps + 1 iterates (B, …)
    are detached.
    """
    point = start.detach()
    yield point
    scale = geometry.per_example(step_size, start) if isinstance(step_size, Tensor) else step_size
    for _ in range(steps):
        point = project(
            point + scale * geometry.steepest(evaluate(point)[1], norm, geometry.SPREAD)
        ).detach()
        yield point


def last(iterates: Iterator[Tensor]) -> Tensor:
    """The final iterate; earlier ones are not kept in memory."""
    return deque(iterates, maxlen=1)[0]
