"""What a fitted mixture knows about its fit: the images that were used, and the other mixtures on the frontier."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.serialize import Share
from equipoise.data import Dataset
from equipoise.mixing.logit_maps import LogitMap


@dataclass(frozen=True)
class Provenance:
    """The fitting images by data set, split and position, and what the fit promised; prevents evaluation on them."""

    data: str
    split: str
    images: tuple[str, ...]  # positions in the split, such as "9000-9999"
    promise: str

    def __post_init__(self) -> None:
        self._ranges()

    def _ranges(self) -> list[tuple[int, int]]:
        """First and last position of every range."""
        ranges = []
        for text in self.images:
            ends = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
            low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
            checks.require(low <= high, "images", 'be ranges of positions such as "9000-9999"', text)
            ranges.append((low, high))
        return ranges

    @classmethod
    def of(cls, data: Dataset, promise: str) -> Provenance:
        """The provenance of a mixture that was fitted on these images."""
        return cls(data.name, data.split, index_ranges(data.index), promise)

    def with_target(self, lose_at_most: float) -> Provenance:
        """The same images with the promise of another mixture of the frontier; `lose_at_most` is in [0, 1]."""
        return replace(self, promise=f"loses at most {100 * lose_at_most:.3g} points of robust accuracy in "
                       "expectation, as one of several mixtures fitted on the same images")

    def overlap(self, data: Dataset) -> tuple[str, ...]:
        """The images of `data` that the mixture was fitted on, as ranges; empty if there are none."""
        if (self.data, self.split) != (data.name, data.split) or not self.images:
            return ()
        # A range is never expanded. Of those that begin at or before an image, one that ends last decides.
        lows, highs = np.array(sorted(self._ranges())).T
        before = np.searchsorted(lows, data.index.cpu().numpy(), side="right")
        last = np.concatenate([[-1], np.maximum.accumulate(highs)])[before]
        return index_ranges(data.index[data.index <= torch.from_numpy(last).to(data.index.device)])


def index_ranges(index: Tensor) -> tuple[str, ...]:
    """Positions as ranges of consecutive numbers.

    >>> import torch
    >>> index_ranges(torch.tensor([3, 4, 5, 9]))
    ('3-5', '9')
    """
    # Within consecutive numbers, the difference between number and position is constant.
    runs = groupby(enumerate(sorted(index.tolist())), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(items) for _, items in runs)]
    return tuple(f"{low}-{high}" if high > low else f"{low}" for low, high in ends)


@dataclass(frozen=True)
class FrontierMixture:
    """One mixture of the frontier between promised robustness and clean accuracy."""

    lose_at_most: Share  # promised upper bound of the robust accuracy lost, in [0, 1]
    clean: Share  # accuracy on clean images that were not used to select it
    alpha: Share
    clamp: str
    scale: float
    power: float
    shift: float
    rivals: float = 1.0
    unit: float = 0.0  # 0 is the layer norm

    def logit_map(self) -> LogitMap:
        """The map of the robust side."""
        return LogitMap(self.scale, self.power, self.shift, self.clamp, rivals=self.rivals, unit=self.unit or None)


Frontier = tuple[FrontierMixture, ...]


def pareto_frontier(mixtures: Iterable[FrontierMixture]) -> Frontier:
    """Sorted by the promise, only the mixtures that are more accurate than every mixture that loses less."""
    frontier: list[FrontierMixture] = []
    for mixture in sorted(mixtures, key=lambda m: (m.lose_at_most, -m.clean)):
        if not frontier or mixture.clean > frontier[-1].clean:
            frontier.append(mixture)
    return tuple(frontier)


def select_mixture(frontier: Frontier, lose_at_most: float) -> FrontierMixture:
    """The most accurate mixture that promises to lose at most so many points (of 100) of robust accuracy."""
    checks.require(len(frontier) > 0, "mixture", "have a fitted frontier", "none")
    checks.within("lose_at_most", lose_at_most, 0, 100)
    allowed = [mixture for mixture in frontier if mixture.lose_at_most <= lose_at_most / 100 + 1e-12]
    least = 100 * min(mixture.lose_at_most for mixture in frontier)
    checks.require(bool(allowed), "lose_at_most", f"be at least {least:.3g}, the least that was fitted", lose_at_most)
    return max(allowed, key=lambda mixture: mixture.clean)
