"""Accuracy against the radius of the attack, from the smallest misclassified perturbation of every
image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.core import stats
from equipoise.core.serialize import Count, NonNegative
from equipoise.core.stats import Estimate

POINTS = 21  # radii of a curve, from 0 to the largest


@dataclass(frozen=True, kw_only=True)
class CurvePoint(Estimate):
    """Share of images that no perturbation of at most this radius was found to break, with its
    exact interval."""

    radius: NonNegative


@dataclass(frozen=True, kw_only=True)
class RadiusCurve:
    """Accuracy of one model against the radius; radii are upper bounds, so the accuracies are too.

    Images that are misclassified without a perturbation have radius 0. Those that nothing broke up
    to the largest radius have none, and count as robust at every radius of the curve.
    """

    model: str
    norm: str
    n: Count
    wrong: Count  # images of radius 0
    broken: Count  # images of a positive radius
    survived: Count  # images without a radius
    # Within it at least half of the images are broken; None: above the largest
    median: NonNegative | None = None
    points: tuple[CurvePoint, ...]


def radius_curve(model: str, norm: str, radii: Mapping[int, float], largest: float) -> RadiusCurve:
    """The curve of one model from the radii of its images by index, infinite for those that nothing
    broke."""
    ordered = sorted(radii.values())
    n, middle = len(ordered), ordered[(len(ordered) - 1) // 2]
    points = [
        CurvePoint(**vars(stats.share(radius > at for radius in ordered)), radius=at)
        for at in (largest * step / (POINTS - 1) for step in range(POINTS))
    ]
    wrong, survived = ordered.count(0.0), ordered.count(math.inf)
    return RadiusCurve(
        model=model,
        norm=norm,
        n=n,
        wrong=wrong,
        broken=n - wrong - survived,
        survived=survived,
        median=None if math.isinf(middle) else middle,
        points=tuple(points),
    )
