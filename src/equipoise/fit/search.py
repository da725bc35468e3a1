"""From margins to the best map: a grid, then smaller and smaller steps around the best candidates.

Pure functions of cached logits; no model is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equipoise import checks, rng
from equipoise.fit.cache import Cache
from equipoise.fit.promise import Target, threshold
from equipoise.fit.tables import Family, Table, Tabulate

FRAGILE = 1e-3  # a threshold nearer to 0 or 1 hangs on the last digits of fp32
LIMITS = ((0.01, 50.0), (0.5, 8.0), (-3.0, 1.0))  # s, p, c: beyond, a change in the last digits changes answers
OBJECTIVES = ("mixture", "surrogate")
RULES = ("auto", "nuts", "switch")
NAMES = ("s", "p", "c")


@dataclass(frozen=True)
class Box:
    """Where to look: s on a logarithmic scale, p and c on linear ones. The default is the paper's for CIFAR-10."""

    s: tuple[float, float] = (0.05, 5.0)
    p: tuple[float, float] = (1.0, 4.0)
    c: tuple[float, float] = (-1.1, 0.0)
    steps: int = 8

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The values of s, p and c on the grid."""
        low, high = (math.log(end) for end in self.s)
        return (torch.linspace(low, high, self.steps, dtype=torch.float64).exp(),
                torch.linspace(*self.p, self.steps, dtype=torch.float64),
                torch.linspace(*self.c, self.steps, dtype=torch.float64))

    def widened(self, edges: Sequence[str]) -> Box:
        """One more half of the box beyond every edge named, such as "s high"."""
        ends = {"s": [math.log(end) for end in self.s], "p": list(self.p), "c": list(self.c)}
        for name, (least, most) in zip(NAMES, LIMITS, strict=True):
            low, high = ends[name]
            least, most = (math.log(least), math.log(most)) if name == "s" else (least, most)
            half = (high - low) / 2
            ends[name] = [max(least, low - half) if f"{name} low" in edges else low,
                          min(most, high + half) if f"{name} high" in edges else high]
        low, high = (math.exp(end) for end in ends["s"])
        return Box((low, high), (ends["p"][0], ends["p"][1]), (ends["c"][0], ends["c"][1]), self.steps)

    def edges(self, candidate: Tensor) -> list[str]:
        """The edges a candidate sits on, unless nothing lies beyond them."""
        found = []
        for name, value, (low, high), (least, most) in zip(
                NAMES, candidate[:3].tolist(), (self.s, self.p, self.c), LIMITS, strict=True):
            near = 1e-6 * max(abs(low), abs(high))
            found += [f"{name} low"] if value <= low + near and low > least + near else []
            found += [f"{name} high"] if value >= high - near and high < most - near else []
        return found


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates with their thresholds and worth under one target."""

    table: Table
    q: Tensor  # (G,)
    worth: Tensor  # (G,) more is better; −inf where rejected
    plain: Tensor  # (G,) the same with rejected ones, for the landscape
    rejected: dict[str, int]  # reason → candidates

    @property
    def best(self) -> int:
        """The most worthy; of equals the one with the most ordinary threshold."""
        calm = -(torch.logit(self.q.clamp(1e-9, 1 - 1e-9).double())).abs()
        order = torch.where(self.worth == self.worth.amax(), calm, -torch.inf)
        return int(order.argmax())


@dataclass
class Search:
    """The search on one half of the images, kept so that further targets cost next to nothing."""

    cache: Cache
    clamp: str
    objective: str = "mixture"
    rule: str = "auto"
    seed: int = 0
    start: Box = field(default_factory=Box)
    notes: list[str] = field(default_factory=list)
    box: Box = field(init=False)
    table: Table = field(init=False)
    landscape: Table = field(init=False)

    def __post_init__(self) -> None:
        checks.one_of("objective", self.objective, OBJECTIVES)
        known = self.cache if self.objective == "mixture" else replace(self.cache, accurate=None)
        if self.objective == "mixture":
            checks.require(known.accurate is not None, "objective", "be surrogate without an accurate model", "mixture")
        self.look = Tabulate(known, self.clamp)
        answers = self.cache.clean.argmax(dim=1)
        self.right = answers == self.cache.labels
        self.right_accurate = None if known.accurate is None else known.accurate == self.cache.labels
        self.box = self.start
        self.families = families(checks.one_of("rule", self.rule, RULES), self.cache)
        tables = [self.look.grid(family, *self.box.axes()) for family in self.families]
        self.landscape, self.table = tables[0], _joined(tables)

    def scored(self, target: Target, table: Table | None = None) -> Scored:
        """Thresholds, worth and rejections of all candidates so far."""
        table = table or self.table
        q = threshold(table.margins, target.allowed(len(self.cache), self.look.kept))
        worth = self._worth(table, q)
        reordering = table.reordered > 0
        fragile = ((q < FRAGILE) | (q > 1 - FRAGILE)) & ~reordering
        reasons = {"reorders the robust model's classes": reordering, "threshold too near to 0 or 1": fragile}
        usable = torch.where(reordering | fragile, -torch.inf, worth)
        return Scored(table, q, usable, worth, {reason: int(mask.sum()) for reason, mask in reasons.items()})

    def _worth(self, table: Table, q: Tensor) -> Tensor:
        open_ = table.gaps <= q.unsqueeze(1)
        if self.right_accurate is not None:
            return torch.where(open_, self.right_accurate, self.right).float().mean(dim=1)
        wrong = ~self.right
        return open_[:, wrong].float().mean(dim=1) if bool(wrong.any()) else q

    def widen(self, target: Target, times: int = 3) -> None:
        """Grow the box while the best candidate sits on its edge."""
        for _ in range(times):
            scored = self.scored(target)
            if not bool(scored.worth.isfinite().any()):
                return
            edges = self.box.edges(scored.table.candidates[scored.best])
            if not edges:
                return
            self.notes.append(f"the best of the grid sat on the edge of the box ({', '.join(edges)}): widened")
            self.box = self.box.widened(edges)
            family = _family(scored.table.candidates[scored.best])
            self.table = self.table.join(self.look.grid(family, *self.box.axes()))

    def refine(self, target: Target, rounds: int = 6, tries: int = 24, scales: int = 4) -> None:
        """Random steps around the best candidate, halved every round."""
        s, p, c = self.box.axes()
        reach = torch.tensor([math.log(s[1] / s[0]), p[1] - p[0], c[1] - c[0]], dtype=torch.float64)
        chance = rng.stream(self.seed, "refine", torch.arange(tries))
        low, high = (torch.tensor([ends[side] for ends in LIMITS], dtype=torch.float64) for side in (0, 1))
        for number in range(rounds):
            scored = self.scored(target)
            if not bool(scored.worth.isfinite().any()):
                return
            centre = scored.table.candidates[scored.best]
            step = chance.at("round", number).normal(2 + scales).double() * 0.5**number
            pairs = (centre[1:3] + step[:, :2] * reach[1:]).clamp(low[1:], high[1:])
            around = (centre[0] * (step[:, 2:] * reach[0]).exp()).clamp(low[0], high[0])
            self.table = self.table.join(self.look.at(_family(centre), pairs, around))


def families(rule: str, cache: Cache) -> list[Family]:
    """What is tried: `nuts` the paper's maps, `switch` those that only ask how sure h is, `auto` all.

    The unit of unnormalised logits is their usual deviation, so that one box serves both.
    """
    unit = float(cache.clean.std(dim=1).mean())
    nuts, switch = [Family()], [Family(0.0), Family(0.0, unit)]
    return {"nuts": nuts, "switch": switch, "auto": [*nuts, *switch]}[rule]


def _joined(tables: Sequence[Table]) -> Table:
    whole = tables[0]
    for table in tables[1:]:
        whole = whole.join(table)
    return whole


def _family(candidate: Tensor) -> Family:
    return Family(float(candidate[3]), float(candidate[4]))

