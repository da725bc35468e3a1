"""Which images a mixture was fitted on, so that nobody evaluates it on them unawares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from equipoise.core import checks
from equipoise.data import Dataset

KEYS = ("data", "split", "images", "promise")


@dataclass(frozen=True)
class Provenance:
    """The fitting images by data set, split and position, and what the fit promised on their strength."""

    data: str
    split: str
    images: tuple[str, ...]  # positions in the split, as "9000-9999"
    promise: str

    @classmethod
    def on(cls, data: Dataset, promise: str) -> Provenance:
        """Fitted on these images."""
        return cls(data.name, data.split, ranges(data.index), promise)

    def slid(self, lose_at_most: float) -> Provenance:
        """The same images with the promise of another point of the frontier, a share of all images."""
        return replace(self, promise=f"loses at most {100 * lose_at_most:.3g} points of robust accuracy in "
                       "expectation, as one of several mixtures fitted on the same images")

    def facts(self) -> dict[str, Any]:
        """As it stands in `mixture.toml`."""
        return {key: getattr(self, key) for key in KEYS}

    def overlap(self, data: Dataset) -> tuple[str, ...]:
        """The images of `data` that the mixture was fitted on, as ranges; empty if there are none."""
        if (self.data, self.split) != (data.name, data.split):
            return ()
        own = {i for text in self.images for i in _range(text)}
        return ranges(data.index[[i in own for i in data.index.tolist()]])


def ranges(index: Tensor) -> tuple[str, ...]:
    """Positions as runs of neighbours.

    >>> import torch
    >>> ranges(torch.tensor([3, 4, 5, 9]))
    ('3-5', '9')
    """
    found: list[list[int]] = []
    for i in sorted(index.tolist()):
        if found and i == found[-1][1] + 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return tuple(f"{low}-{high}" if high > low else f"{low}" for low, high in found)


def from_facts(told: Mapping[str, Any], where: str) -> Provenance:
    """Read back what `facts` told."""
    checks.require(set(told) == set(KEYS), f"fitted in {where}", f"hold {', '.join(KEYS)}", sorted(told))
    return Provenance(told["data"], told["split"], tuple(told["images"]), told["promise"])


def _range(text: str) -> range:
    low, _, high = text.partition("-")
    return range(int(low), int(high or low) + 1)
