"""Search of the best logit map: a grid, then random steps of decreasing size around the best
candidates.

Everything here is a function of cached logits; no model is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import rng
from equipoise.core.device import single_thread
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.conformal import Target, ascending, threshold_of_sorted
from equipoise.fitting.margin_grid import MapFamily, MarginGrid, MarginTable

# s, p, c: beyond these, rounding errors change predictions
LIMITS = (0.01, 50.0), (0.5, 8.0), (-3.0, 1.0)
NAMES = ("s", "p", "c")
MIN_Q = 1e-3  # a threshold nearer to 0 or 1 depends on rounding errors of fp32
# A margin nearer to 1 has no gradient in fp32, and cannot be told from others like it
SATURATED = 1e-6
SPLITS = 4  # random splits for the comparison of families


@dataclass(frozen=True)
class SearchSpace:
    """A box of s (on a logarithmic scale), p and c. The default is the paper's for CIFAR-10."""

    s: tuple[float, float] = (0.05, 5.0)
    p: tuple[float, float] = (1.0, 4.0)
    c: tuple[float, float] = (-1.1, 0.0)
    steps: int = 8

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The values of s, p and c on the grid."""
        low, high = (math.log(end) for end in self.s)
        return (
            torch.linspace(low, high, self.steps, dtype=torch.float64).exp(),
            torch.linspace(*self.p, self.steps, dtype=torch.float64),
            torch.linspace(*self.c, self.steps, dtype=torch.float64),
        )

    def widened(self, edges: Sequence[str]) -> SearchSpace:
        """The box extended by half of its width beyond every named edge, such as "s high"."""
        ranges: dict[str, Any] = {}
        for name, ends, limits in zip(NAMES, (self.s, self.p, self.c), LIMITS, strict=True):
            scale, unscale = (math.log, math.exp) if name == "s" else (float, float)
            low, high, lowest, highest = map(scale, (*ends, *limits))
            half = (high - low) / 2
            ranges[name] = (
                unscale(max(lowest, low - half) if f"{name} low" in edges else low),
                unscale(min(highest, high + half) if f"{name} high" in edges else high),
            )
        return replace(self, **ranges)

    def edges(self, candidate: Tensor) -> list[str]:
        """The edges on which a candidate lies, except those at the limits."""
        edges = []
        for name, value, (low, high), (lowest, highest) in zip(
            NAMES, candidate.tolist(), (self.s, self.p, self.c), LIMITS, strict=True
        ):
            tolerance = 1e-6 * max(abs(low), abs(high))
            edges += (
                [f"{name} low"] if value <= low + tolerance and low > lowest + tolerance else []
            )
            edges += (
                [f"{name} high"] if value >= high - tolerance and high < highest - tolerance else []
            )
        return edges


@dataclass(frozen=True, eq=False)
class ScoredTable:
    """Candidates of a family with their thresholds and scores under one target."""

    table: MarginTable
    q: Tensor  # (G,)
    score: Tensor  # (G,) higher is better; −inf where rejected
    unfiltered_score: Tensor  # (G,) the same, without rejections

    @property
    def has_candidates(self) -> bool:
        """Whether a candidate was not rejected."""
        return bool(self.score.isfinite().any())

    @property
    def best(self) -> int:
        """The candidate with the highest score."""
        return _best(self.score, self.q)


@dataclass(frozen=True, eq=False)
class SelectedMap:
    """The map selected by a search."""

    family: MapFamily
    candidate: Tensor  # (3,) s, p, c
    score: float
    first_q: float | None = None  # of a cascade: threshold of the first view
    first_scale: float | None = None  # of a cascade: s for the first view


class MapSearch:
    """Search on one half of the fitting images; its tables make further targets cheap.

    Families are compared by cross-validation, because the best of many candidates overestimates a
    large family more than a small one. The objective `mixture` scores clean accuracy of the
    mixture, `surrogate` the share of the robust model's clean errors on which the accurate model
    may decide [Bai2024nuts], `conditional` the same share of those errors that the accurate model
    does not make [Bai2024nuts, D.8.3].
    """

    @single_thread()
    def __init__(
        self,
        logits: CachedLogits,
        families: Sequence[MapFamily] = (MapFamily(),),
        objective: str = "mixture",
        seed: int = 0,
        space: SearchSpace | None = None,
    ) -> None:
        self.logits, self.families, self.objective, self.seed = logits, families, objective, seed
        self.space = space or SearchSpace()
        self.notes: list[str] = []
        self.correct, self.accurate_correct = logits.correct, logits.accurate == logits.labels
        self.decisive = self._decisive()
        self.grid = MarginGrid(logits, use_accurate=objective == "mixture", gaps_of=self.decisive)
        self.spaces = dict.fromkeys(families, self.space)
        self.tables = {family: self._initial_table(family) for family in families}
        self._sorted_margins: WeakKeyDictionary[MarginTable, list[list[Tensor]]] = (
            WeakKeyDictionary()
        )

    def _decisive(self) -> Tensor:
        """(N,) the images on which the score depends on which model decides."""
        if self.objective == "mixture":
            return self.correct != self.accurate_correct
        return (
            ~self.correct & self.accurate_correct
            if self.objective == "conditional"
            else ~self.correct
        )

    def _initial_table(self, family: MapFamily) -> MarginTable:
        if not family.scale_only:
            return self.grid.grid(family, *self.spaces[family].axes())
        one = torch.ones(1, dtype=torch.float64)
        return self.grid.grid(
            family, SearchSpace(s=LIMITS[0], steps=4 * self.space.steps).axes()[0], one, 0 * one
        )

    @single_thread()
    def run(self, target: Target) -> SelectedMap | None:
        """Search for one target: widen the grids, refine, and select."""
        self.widen(target)
        self.refine(target)
        return self.select(target)

    def select(self, target: Target) -> SelectedMap | None:
        """The best candidate of the family that does best in cross-validation; None if all were
        rejected."""
        scored = {family: self.score(target, self.tables[family]) for family in self.families}
        usable = [family for family in self.families if scored[family].has_candidates]
        if not usable:
            return None

        # Of equal families the one with fewer parameters.
        family = (
            usable[0]
            if len(usable) == 1
            else max(
                usable,
                key=lambda family: (
                    self._cross_validate(scored[family], target),
                    family.scale_only,
                ),
            )
        )
        best = scored[family].best
        return SelectedMap(
            family, scored[family].table.candidates[best], float(scored[family].score[best])
        )

    def score(self, target: Target, table: MarginTable) -> ScoredTable:
        """Thresholds, scores and rejections of all candidates of a table."""
        q = threshold_of_sorted(
            table.sorted_margins, target.allowed(len(self.logits), len(self.grid.rows))
        )
        score = self._scores(table, q, torch.ones_like(self.correct))
        rejected = (table.reordered > 0) | is_fragile(table.sorted_margins, q)
        return ScoredTable(table, q, torch.where(rejected, -torch.inf, score), score)

    def rejected(self, target: Target) -> dict[str, int]:
        """How many candidates of all families were rejected, by reason."""
        counts = dict.fromkeys(
            (
                "reorders the robust model's classes",
                "threshold too near to 0 or 1",
                "saturated near the threshold",
            ),
            0,
        )
        for table in self.tables.values():
            scored = self.score(target, table)
            reorders = table.reordered > 0
            extreme = ((scored.q < MIN_Q) | (scored.q > 1 - MIN_Q)) & ~reorders
            saturated = scored.score.isinf() & ~reorders & ~extreme
            for reason, rejected in zip(counts, (reorders, extreme, saturated), strict=True):
                counts[reason] += int(rejected.sum())
        return counts

    def _scores(self, table: MarginTable, q: Tensor, rows: Tensor) -> Tensor:
        """(G,) the objective on the images of a mask (N,)."""
        # Written as numbers, which is faster than to convert bools.
        by_accurate = torch.le(table.gaps, q.unsqueeze(1), out=torch.empty_like(table.gaps))
        weights = rows[self.decisive].float()
        if self.objective == "mixture":
            gained = torch.where(self.accurate_correct[self.decisive], weights, -weights)
            return ((self.correct & rows).sum() + by_accurate @ gained) / rows.sum()
        return by_accurate @ weights / weights.sum() if bool(weights.any()) else q

    @cached_property
    def _splits(self) -> list[tuple[Tensor, Tensor]]:
        """Random halves of the images as masks (N,), the same for all targets."""
        orders = [
            rng.stream(self.seed, "across", self.logits.index)
            .at(number)
            .words()
            .argsort(stable=True)
            for number in range(SPLITS)
        ]
        firsts = [order.argsort() < len(order) // 2 for order in orders]
        return [(first, ~first) for first in firsts]

    def _sorted_halves(self, table: MarginTable) -> list[list[Tensor]]:
        """By split and half: the margins (G, r) of its robust images in ascending order, kept for
        other targets."""
        if table not in self._sorted_margins:
            self._sorted_margins[table] = [
                [ascending(table.margins[:, rows[self.grid.rows]]) for rows in halves]
                for halves in self._splits
            ]
        return self._sorted_margins[table]

    def _cross_validate(self, scored: ScoredTable, target: Target) -> float:
        """Mean score, on one random half, of the candidate that the other half selects; each with
        its own threshold."""
        scores, rejected = [], ~scored.score.isfinite()
        for halves, margins in zip(self._splits, self._sorted_halves(scored.table), strict=True):
            q, score = [], []
            for rows, own in zip(halves, margins, strict=True):
                # This is no promise; with confidence, so few images would allow no loss at all.
                allowed = replace(target, confidence=None).allowed(int(rows.sum()), own.shape[1])
                q.append(threshold_of_sorted(own, allowed))
                score.append(self._scores(scored.table, q[-1], rows))
            for one, other in ((0, 1), (1, 0)):
                usable = score[one].masked_fill(rejected, -torch.inf)
                scores.append(float(score[other][_best(usable, q[one])]))
        return sum(scores) / len(scores)

    def widen(self, target: Target, times: int = 3) -> None:
        """Extend the grids while their best candidate lies on an edge."""
        for family in self.families:
            for _ in range(0 if family.scale_only else times):
                scored = self.score(target, self.tables[family])
                edges = (
                    self.spaces[family].edges(scored.table.candidates[scored.best])
                    if scored.has_candidates
                    else []
                )
                if not edges:
                    break
                self.notes.append(
                    f"{family}: the best candidate lay on the edge of the search space "
                    f"({', '.join(edges)}), which was widened"
                )
                self.spaces[family] = self.spaces[family].widened(edges)
                self.tables[family] = self.tables[family].join(self._initial_table(family))

    def refine(self, target: Target, rounds: int = 5, tries: int = 16, scales: int = 4) -> None:
        """Add random steps around the best candidate of every family; their size is halved every
        round."""
        stream = rng.stream(self.seed, "refine", torch.arange(tries))
        low, high = (
            torch.tensor([limits[end] for limits in LIMITS], dtype=torch.float64) for end in (0, 1)
        )
        for family in (family for family in self.families if not family.scale_only):
            s, p, c = self.spaces[family].axes()
            spacing = torch.tensor(
                [math.log(s[1] / s[0]), p[1] - p[0], c[1] - c[0]], dtype=torch.float64
            )
            for number in range(rounds):
                scored = self.score(target, self.tables[family])
                if not scored.has_candidates:
                    break
                centre = scored.table.candidates[scored.best]
                step = stream.at("round", number).normal(2 + scales).double() * 0.5**number
                pairs = (centre[1:] + step[:, :2] * spacing[1:]).clamp(low[1:], high[1:])
                nearby = (centre[0] * (step[:, 2:] * spacing[0]).exp()).clamp(low[0], high[0])
                self.tables[family] = self.tables[family].join(self.grid.at(family, pairs, nearby))


def families(rule: str, logits: CachedLogits, clamp: str) -> list[MapFamily]:
    """The families of a rule: `nuts` the paper's maps, `switch` and `cascade` confidence switches,
    `auto` both.

    The unit of unnormalized logits is their mean standard deviation, so that one search space
    serves all models.
    """
    unit = float(logits.clean.std(dim=1).mean())
    switches = [MapFamily(clamp, 0.0, unit), MapFamily("linear", 0.0, unit, scale_only=True)]
    return {
        "nuts": [MapFamily(clamp)],
        "switch": switches,
        "cascade": switches,
        "auto": [MapFamily(clamp), *switches],
    }[rule]


def is_fragile(margins: Tensor, q: Tensor) -> Tensor:
    """(G,) whether a threshold depends on rounding errors, or lies where the map of (G, R) sorted
    margins is saturated.

    A threshold between saturated margins is 1/2 for no reason but its position half way between 0
    and 1. So the margins decide, not the threshold: the next one above it must not be near 1, and
    most must not be rounded to 1, where an attack on the mapped model finds no gradient.
    """
    limits = (1 - SATURATED, torch.finfo(q.dtype).max)
    ends = torch.stack([q, *(torch.full_like(q, limit) for limit in limits)], dim=1)
    lost, unsaturated, finite = torch.searchsorted(margins, ends, right=True).unbind(dim=1)
    above = F.pad(margins, (0, 1), value=torch.inf).gather(1, lost.unsqueeze(1)).squeeze(1)
    most = finite - unsaturated > 0.5 * finite
    return (q < MIN_Q) | (q > 1 - MIN_Q) | ((above > 1 - MIN_Q) & above.isfinite()) | most


def _best(score: Tensor, q: Tensor) -> int:
    """The highest score; of equal ones the threshold nearest to 1/2 on the scale of log-odds."""
    centrality = -torch.logit(q.clamp(1e-9, 1 - 1e-9).double()).abs()
    return int(torch.where(score == score.amax(), centrality, -torch.inf).argmax())
