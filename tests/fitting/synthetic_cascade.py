"""Synthetic logits of a robust model and its first view, and what a fit of a cascade does after its
attacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from synthetic_logits import make_logits

from equipoise.core import rng
from equipoise.core.promises import Target
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.cascade import CascadeCalibration, select_cascade
from equipoise.fitting.margin_grid import MapFamily
from equipoise.fitting.search import SelectedMap

POPULATION = 3000
VIEWS, BUDGET = 6, 2.6


def with_first_view(logits: CachedLogits, noise: float = 0.6) -> CachedLogits:
    """Logits of a first view that is wrong more often than all views together, and at attacked
    points surely so."""
    stream = rng.stream(5, "first", torch.arange(len(logits)))
    first = logits.clean + noise * stream.normal(logits.clean.shape[1])
    points = len(logits.attacked)
    pushed = torch.stack(
        [
            logits.attacked[k] + 2 * noise * stream.at(k).normal(logits.clean.shape[1])
            for k in range(points)
        ]
    )
    return replace(logits, first=first, first_attacked=pushed)


@dataclass
class OneSwitch:
    """A search that has found one switch."""

    seed: int = 0
    scale: float = 1.5

    def select(self, target: Target) -> SelectedMap:
        return SelectedMap(
            MapFamily("linear", 0.0, 1.0, scale_only=True),
            torch.tensor([self.scale, 1.0, 0.0], dtype=torch.float64),
            0.0,
        )

    def rejected(self, target: Target) -> dict[str, int]:
        return {}


@cache
def population() -> CachedLogits:
    return with_first_view(make_logits(POPULATION))


def calibration_of(
    logits: CachedLogits, target: Target, seed: int = 0, budget: float = BUDGET
) -> CascadeCalibration:
    """The two steps of a fit that follow its attacks."""
    search: Any = OneSwitch(seed)
    selected = select_cascade(search, logits, target, VIEWS, budget)
    return CascadeCalibration(search, logits, target, selected)
