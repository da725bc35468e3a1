"""From margins to the best map: a grid, then smaller and smaller steps around the best candidates.

Pure functions of cached logits; no model is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.fitting.cache import Cache
from equipoise.fitting.conformal import Target, threshold
from equipoise.fitting.margin_grid import Family, MarginGrid, MarginTable
from equipoise.fitting.search_space import LIMITS, SearchSpace
from equipoise.mixing import LogitMap

FRAGILE = 1e-3  # a threshold nearer to 0 or 1 hangs on the last digits of fp32
OBJECTIVES = ("mixture", "surrogate")
RULES = ("auto", "nuts", "switch")
SPLITS = 4


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates of a family with their thresholds and worth under one target."""

    table: MarginTable
    q: Tensor  # (G,)
    worth: Tensor  # (G,) more is better; −inf where rejected
    plain: Tensor  # (G,) the same with rejected ones, for the landscape
    rejected: dict[str, int]  # reason → candidates

    @property
    def any(self) -> bool:
        """Whether a candidate is left."""
        return bool(self.worth.isfinite().any())

    @property
    def best(self) -> int:
        """The most worthy; of equals the one with the most ordinary threshold."""
        return _best(self.worth, self.q)


@dataclass(frozen=True, eq=False)
class ChosenMap:
    """The map that a search settles on."""

    family: Family
    candidate: Tensor  # (3,) s, p, c
    worth: float

    def map(self) -> LogitMap:
        """As a module."""
        return self.family.map(self.candidate)


@dataclass
class MapSearch:
    """The search on one half of the images, kept so that further targets cost next to nothing.

    `families` are compared on random halves of the images, each half choosing for the other, because the best
    of many candidates flatters a large family more than a small one.
    """

    cache: Cache
    families: Sequence[Family] = (Family(),)
    objective: str = "mixture"
    seed: int = 0
    start: SearchSpace = field(default_factory=SearchSpace)
    notes: list[str] = field(default_factory=list)
    tables: dict[Family, MarginTable] = field(init=False)
    landscape: MarginTable = field(init=False)

    def __post_init__(self) -> None:
        checks.one_of("objective", self.objective, OBJECTIVES)
        known = self.cache if self.objective == "mixture" else replace(self.cache, accurate=None)
        if self.objective == "mixture":
            checks.require(known.accurate is not None, "objective", "be surrogate without an accurate model", "mixture")
        self.look = MarginGrid(known)
        self.right = self.cache.clean.argmax(dim=1) == self.cache.labels
        self.right_accurate = None if known.accurate is None else known.accurate == self.cache.labels
        self.boxes = dict.fromkeys(self.families, self.start)
        self.tables = {family: self._grid(family) for family in self.families}
        self.landscape = self.tables[self.families[0]]

    def _grid(self, family: Family) -> MarginTable:
        if family.free:
            return self.look.grid(family, *self.boxes[family].axes())
        low, high = (math.log(end) for end in LIMITS[0])
        scales = torch.linspace(low, high, 4 * self.start.steps, dtype=torch.float64).exp()
        one = torch.ones(1, dtype=torch.float64)
        return self.look.grid(family, scales, one, 0 * one)

    def choose(self, target: Target) -> ChosenMap | None:
        """The best candidate of the family that does best on images that did not choose it."""
        scored = {family: self.scored(target, self.tables[family]) for family in self.families}
        usable = [family for family in self.families if scored[family].any]
        if not usable:
            return None
        # Of equals the family with fewer numbers.
        family = max(usable, key=lambda f: (self._across(f, scored[f], target) if len(usable) > 1 else 0.0, not f.free))
        best = scored[family].best
        return ChosenMap(family, scored[family].table.candidates[best], float(scored[family].worth[best]))

    def scored(self, target: Target, table: MarginTable) -> Scored:
        """Thresholds, worth and rejections of all candidates of a table."""
        q = threshold(table.margins, target.allowed(len(self.cache), self.look.kept))
        worth = self._worth(table, q, slice(None))
        reordering = table.reordered > 0
        fragile = ((q < FRAGILE) | (q > 1 - FRAGILE)) & ~reordering
        reasons = {"reorders the robust model's classes": reordering, "threshold too near to 0 or 1": fragile}
        usable = torch.where(reordering | fragile, -torch.inf, worth)
        return Scored(table, q, usable, worth, {reason: int(mask.sum()) for reason, mask in reasons.items()})

    def rejected(self, target: Target) -> dict[str, int]:
        """Why candidates of all families were rejected, and how many."""
        total: dict[str, int] = {}
        for table in self.tables.values():
            for reason, count in self.scored(target, table).rejected.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def _worth(self, table: MarginTable, q: Tensor, rows: Tensor | slice) -> Tensor:
        speaks = table.gaps[:, rows] <= q.unsqueeze(1)
        right = self.right[rows]
        if self.right_accurate is not None:
            return torch.where(speaks, self.right_accurate[rows], right).float().mean(dim=1)
        return speaks[:, ~right].float().mean(dim=1) if not bool(right.all()) else q

    def _across(self, family: Family, scored: Scored, target: Target) -> float:
        """Worth on one random half of what the other half chooses, each with its own threshold, on average."""
        table, found = scored.table, []
        for number in range(SPLITS):
            order = rng.stream(self.seed, "across", self.cache.index).at(number).words().argsort(stable=True)
            sides = order[: len(order) // 2], order[len(order) // 2 :]
            q, worth = zip(*(self._on(table, target, rows) for rows in sides), strict=True)
            for one, other in ((0, 1), (1, 0)):
                own = torch.where(scored.worth.isfinite(), worth[one], -torch.inf)
                found.append(float(worth[other][_best(own, q[one])]))
        return sum(found) / len(found)

    def _on(self, table: MarginTable, target: Target, rows: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.isin(self.look.rows, rows)
        q = threshold(table.margins[:, kept], target.allowed(len(rows), int(kept.sum())))
        return q, self._worth(table, q, rows)

    def widen(self, target: Target, times: int = 3) -> None:
        """Grow the boxes while their best candidate sits on an edge."""
        for family in self.families:
            for _ in range(times if family.free else 0):
                scored = self.scored(target, self.tables[family])
                edges = self.boxes[family].edges(scored.table.candidates[scored.best]) if scored.any else []
                if not edges:
                    break
                self.notes.append(f"{family}: the best sat on the edge of the box ({', '.join(edges)}), widened")
                self.boxes[family] = self.boxes[family].widened(edges)
                self.tables[family] = self.tables[family].join(self._grid(family))

    def refine(self, target: Target, rounds: int = 5, tries: int = 16, scales: int = 4) -> None:
        """Random steps around the best candidate of every family, halved every round."""
        chance = rng.stream(self.seed, "refine", torch.arange(tries))
        low, high = (torch.tensor([ends[side] for ends in LIMITS], dtype=torch.float64) for side in (0, 1))
        for family in (family for family in self.families if family.free):
            s, p, c = self.boxes[family].axes()
            reach = torch.tensor([math.log(s[1] / s[0]), p[1] - p[0], c[1] - c[0]], dtype=torch.float64)
            for number in range(rounds):
                scored = self.scored(target, self.tables[family])
                if not scored.any:
                    break
                centre = scored.table.candidates[scored.best]
                step = chance.at("round", number).normal(2 + scales).double() * 0.5**number
                pairs = (centre[1:] + step[:, :2] * reach[1:]).clamp(low[1:], high[1:])
                around = (centre[0] * (step[:, 2:] * reach[0]).exp()).clamp(low[0], high[0])
                self.tables[family] = self.tables[family].join(self.look.at(family, pairs, around))


def families(rule: str, cache: Cache, clamp: str) -> list[Family]:
    """What is tried: `nuts` the paper's maps, `switch` those that ask only how sure h is, `auto` both.

    The unit of unnormalised logits is their usual deviation, so that one box serves all.
    """
    checks.one_of("rule", rule, RULES)
    unit = float(cache.clean.std(dim=1).mean())
    switch = [Family(clamp, 0.0, unit), Family("linear", 0.0, unit, free=False)]
    return {"nuts": [Family(clamp)], "switch": switch, "auto": [Family(clamp), *switch]}[rule]


def _best(worth: Tensor, q: Tensor) -> int:
    calm = -torch.logit(q.clamp(1e-9, 1 - 1e-9).double()).abs()
    return int(torch.where(worth == worth.amax(), calm, -torch.inf).argmax())
