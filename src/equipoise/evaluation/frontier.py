"""What other mixtures of one pair predict, from the logits of its bases at clean and at attacked
points."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import losses
from equipoise.core.arrays import Array, FrontierArrays
from equipoise.mixing import MixedClassifier

STEPS = 40  # of the slider over alpha


class AttackedPoints(NamedTuple):
    """Logits of the robust model at attacked points, any number of them per image."""

    image: Tensor  # (M,) position of the image of each point
    logits: Tensor  # (M, K)


def compute_frontier(
    mixture: MixedClassifier,
    names: tuple[str, ...],
    index: Tensor,
    labels: Tensor,
    g: Tensor,
    h: Tensor,
    points: AttackedPoints,
) -> FrontierArrays:
    """Predictions of the mixtures of the fitted frontier, and of the mixture's own map at other
    alphas.

    Args:
        mixture: the evaluated one.
        names: of its accurate base, its robust base and itself in rows.
        index, labels: (N,) of the images.
        g, h: outputs of the bases on the clean images, (N, K), or classes (N,) of g.
        points: of the attacks on h and on the mixture.
    """
    steps = _steps(mixture)
    own = next(step for lost, step in steps if lost is None and step.alpha == mixture.alpha)
    by_map = {
        id(step.logit_map): step for _, step in steps
    }  # one of all that differ in alpha alone
    attacked = {
        key: _smallest_margins(partial(_robust_probabilities, step), points, labels)
        for key, step in by_map.items()
    }
    columns = [_predict(step, g, h, attacked[id(step.logit_map)], labels) for _, step in steps]
    sides: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda z: z.float().softmax(dim=1),
        partial(_robust_probabilities, own),
    )
    gaps, clean_margins, margins = [], [], []
    for probabilities in sides:
        top = probabilities(h).topk(2, dim=1).values
        gaps.append((top[:, 0] - top[:, 1]).numpy())
        clean = losses.signed_margin(probabilities(h), labels)
        clean_margins.append(clean.numpy())
        margins.append(
            torch.minimum(clean, _smallest_margins(probabilities, points, labels)).numpy()
        )
    return FrontierArrays(
        index=index.numpy(),
        alpha=np.array([step.alpha for _, step in steps]),
        evaluated=mixture.alpha,
        lost=np.array([math.nan if lost is None else lost for lost, _ in steps]),
        gaps=np.stack(gaps),
        clean_margins=np.stack(clean_margins),
        margins=np.stack(margins),
        names=names,
        **{
            name: np.stack([column[part] for column in columns])
            for part, name in enumerate(("predicted", "by_accurate", "standing"))
        },
    )


def _steps(own: MixedClassifier) -> list[tuple[float | None, MixedClassifier]]:
    """The mixtures of the fitted frontier with the loss they promise, then those of the same map at
    other alphas.

    They are for logits on the CPU; their bases stay where they are.
    """
    logit_map = copy.deepcopy(own.logit_map)
    logit_map = None if logit_map is None else logit_map.cpu()
    frontier = [
        (
            point.lose_at_most,
            MixedClassifier(
                own.accurate, own.robust, point.alpha, hard=True, logit_map=point.logit_map()
            ),
        )
        for point in own.frontier
    ]
    # With hard labels the accurate model decides everything below alpha 1/2: equal steps of q = (1
    # − alpha)/alpha.
    alphas = (
        {1 / (1 + step / STEPS) for step in range(STEPS + 1)} | {0.0}
        if own.hard
        else {step / STEPS for step in range(STEPS + 1)}
    )
    return [
        *frontier,
        *(
            (
                None,
                MixedClassifier(
                    own.accurate,
                    own.robust,
                    alpha,
                    logit_map=logit_map,
                    hard=own.hard,
                    accurate_temperature=own.accurate_temperature,
                ),
            )
            for alpha in sorted(alphas | {own.alpha})
        ),
    ]


def _predict(
    step: MixedClassifier, g: Tensor, h: Tensor, smallest_margins: Tensor, labels: Tensor
) -> tuple[Array, Array, Array]:
    """(N,) classes of clean images, where g can change them, and which images stand at every point
    whatever g says.

    `smallest_margins` (N,) are those over all points.
    """
    classes = step.from_base_outputs(g, h).argmax(dim=1)
    standing = (classes == labels) & (smallest_margins > step.q)
    largest = np.uint8 if h.shape[1] <= 256 else np.uint16
    return (
        classes.numpy().astype(largest),
        step.needs_accurate(step.map_robust(h)).numpy(),
        standing.numpy(),
    )


def _robust_probabilities(step: MixedClassifier, z: Tensor) -> Tensor:
    """(B, K) probabilities of the robust side from the logits of the robust model."""
    return step.map_robust(z).exp()


def _smallest_margins(
    probabilities: Callable[[Tensor], Tensor], points: AttackedPoints, labels: Tensor
) -> Tensor:
    """(N,) the smallest margin of an image over its points; infinite where it has none."""
    margins = losses.signed_margin(probabilities(points.logits), labels[points.image])
    return margins.new_full(labels.shape, torch.inf).scatter_reduce(
        0, points.image, margins, "amin"
    )
