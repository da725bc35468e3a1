"""The mixtures that a fit leaves to choose from: none is beaten by another in both promise and accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.core import checks
from equipoise.mixing.logit_maps import LogitMap

KEYS = ("lose_at_most", "clean", "alpha", "clamp", "scale", "power", "shift", "rivals", "unit")


@dataclass(frozen=True)
class Point:
    """One mixture of a frontier."""

    lose_at_most: float  # promised: points of robust accuracy lost, as a share of all images
    clean: float  # accuracy on clean images that did not choose it
    alpha: float
    clamp: str
    scale: float
    power: float
    shift: float
    rivals: float = 1.0
    unit: float = 0.0  # 0 is the layer norm

    def logit_map(self) -> LogitMap:
        """The map of the robust side."""
        return LogitMap(self.scale, self.power, self.shift, self.clamp, rivals=self.rivals, unit=self.unit or None)


Frontier = tuple[Point, ...]


def non_dominated(points: Iterable[Point]) -> Frontier:
    """In order of the promise, only those that are more accurate than every point that loses less."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.lose_at_most, -p.clean)):
        if not kept or point.clean > kept[-1].clean:
            kept.append(point)
    return tuple(kept)


def choose(frontier: Frontier, lose_at_most: float) -> Point:
    """The most accurate point that promises to lose at most so many points (of 100) of robust accuracy."""
    checks.require(len(frontier) > 0, "mixture", "have a fitted frontier", "none")
    checks.within("lose_at_most", lose_at_most, 0, 100)
    kept = [point for point in frontier if point.lose_at_most <= lose_at_most / 100 + 1e-12]
    least = 100 * min(point.lose_at_most for point in frontier)
    checks.require(bool(kept), "lose_at_most", f"be at least {least:.3g}, the least that was fitted", lose_at_most)
    return max(kept, key=lambda point: point.clean)


def columns(frontier: Frontier) -> dict[str, list[Any]]:
    """As it stands in `mixture.toml`: one list per column."""
    return {key: [getattr(point, key) for point in frontier] for key in KEYS}


def from_columns(told: Mapping[str, Sequence[Any]], where: str) -> Frontier:
    """Read back what :func:`columns` wrote."""
    whole = set(told) == set(KEYS) and all(isinstance(v, list) for v in told.values())
    whole = whole and len({len(v) for v in told.values()}) == 1
    checks.require(whole, f"frontier in {where}", f"have equally long columns {', '.join(KEYS)}", sorted(told))
    return tuple(Point(**dict(zip(KEYS, row, strict=True)))
                 for row in zip(*(told[key] for key in KEYS), strict=True))
