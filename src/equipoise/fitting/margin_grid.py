"""Margins of many logit maps at once, from cached logits.

Each step is computed as rarely as possible: the layer norm once, the clamp once per c, the power
once per (p, c), and only sums of exponentials for every scale s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from equipoise.fitting.cached_logits import ANY_CLASS, CachedLogits
from equipoise.fitting.conformal import ascending
from equipoise.mixing import LogitMap
from equipoise.mixing.logit_maps import CLAMPS, centred, layer_norm, power
from equipoise.mixing.provenance import RULES


@dataclass(frozen=True)
class MapFamily:
    """Logit maps that differ in s, p and c only, or with `scale_only` in s only (p = 1, c = 0)."""

    clamp: str = "gelu-monotone"
    rivals: float = 1.0  # weight of the differences between the classes after the first: 1 in the paper, 0 in a switch
    unit: float = 0.0  # logits are centred and divided by this; 0 is the layer norm
    scale_only: bool = False

    @property
    def rule(self) -> str:
        """The rule that searches this family, a key of `RULES`."""
        return "nuts" if self.rivals == 1 else "switch"

    def __str__(self) -> str:
        method = RULES[self.rule]
        return f"{method} of {'' if self.unit else 'normalized '}logits{', scale only' if self.scale_only else ''}"

    def map(self, candidate: Tensor) -> LogitMap:
        """The map of (s, p, c)."""
        s, p, c = candidate.tolist()
        return LogitMap(s, p, c, self.clamp, rivals=self.rivals, unit=self.unit or None)


@dataclass(frozen=True, eq=False)
class MarginTable:
    """Margins of G maps on N images, R of which the robust model h survives."""

    candidates: Tensor  # (G, 3): s, p, c
    margins: Tensor  # (G, R) smallest margin of a surviving image over its attacked points; lost from q ≥ margin on
    gaps: Tensor  # (G, D) margins of the clean images that have gaps; the accurate model g decides from q ≥ gap on
    # (G,) number of inputs, clean or attacked, on which the map changes the class of h
    reordered: Tensor

    def join(self, other: MarginTable) -> MarginTable:
        """The candidates of both tables."""
        return MarginTable(
            *(
                torch.cat([getattr(table, field.name) for table in (self, other)])
                for field in fields(self)
            )
        )

    @cached_property
    def sorted_margins(self) -> Tensor:
        """(G, R) the margins of every map in ascending order."""
        return ascending(self.margins)


class MarginGrid:
    """Computes a :class:`MarginTable` of candidates on the images of `logits`.

    With r the mapped probabilities of h, the gap of a clean image is r_top − r_j for the class j
    that g predicts, or without `use_accurate` for the runner-up. The margin of an attacked point is
    r_y − r_j for the class j that g predicts there, or for the worst class (ANY_CLASS). With a mask
    `gaps_of` (N,), only those images have gaps.
    """

    def __init__(
        self, logits: CachedLogits, *, use_accurate: bool = True, gaps_of: Tensor | None = None
    ) -> None:
        self.rows = logits.survived.nonzero().squeeze(1)  # images that h survives
        self.points = logits.attacked.shape[0]
        attacked = logits.attacked[:, self.rows].reshape(-1, logits.clean.shape[1]).float()
        labels = logits.labels[self.rows].repeat(self.points)
        top = logits.clean.argmax(dim=1)
        # All logits have their own class (the top one of clean images, the label of attacked ones)
        # in column 0.
        self.own = torch.cat([top, labels])
        self.logits = [_swap_to_front(logits.clean.float(), top), _swap_to_front(attacked, labels)]
        predicted = torch.cat([logits.accurate, logits.accurate_attacked[:, self.rows].reshape(-1)])
        is_any = predicted == ANY_CLASS
        # Where g is correct at an attacked point, no threshold loses the image: its margin is
        # infinite.
        self.least_margin = torch.where((predicted == self.own) & ~is_any, torch.inf, -torch.inf)[
            len(top) :
        ]
        is_any[: len(top)] = not use_accurate
        used = torch.ones_like(is_any)
        used[: len(top)] = True if gaps_of is None else gaps_of
        self.used = used.nonzero().squeeze(
            1
        )  # clean images that have gaps, and all attacked points
        self.is_any = is_any[self.used]
        self.column = _column(torch.where(is_any, self.own, predicted), self.own)[self.used]
        self.normalized: dict[float, list[Tensor]] = {}  # by unit

    def grid(
        self, family: MapFamily, scales: Tensor, powers: Tensor, shifts: Tensor
    ) -> MarginTable:
        """Every combination; s varies fastest, then p, then c."""
        pairs = torch.cartesian_prod(shifts, powers)[:, [1, 0]]
        return self.at(family, pairs, scales.expand(len(pairs), -1))

    def one(self, family: MapFamily, candidate: Tensor) -> MarginTable:
        """A single candidate (s, p, c)."""
        return self.at(family, candidate[1:].unsqueeze(0), candidate[:1].unsqueeze(0))

    def at(self, family: MapFamily, pairs: Tensor, scales: Tensor) -> MarginTable:
        """(M, 2) pairs (p, c), each with its own (M, S) scales: G = M·S candidates."""
        if family.unit not in self.normalized:
            self.normalized[family.unit] = [
                centred(z, family.unit) if family.unit else layer_norm(z) for z in self.logits
            ]
        clamp, normalized = CLAMPS[family.clamp], self.normalized[family.unit]
        margins, gaps, reordered = [], [], []
        # Of the last c: in a grid the next one is the same
        clamped, clamped_at = list[Tensor](), torch.nan
        for (p, c), s in zip(pairs.tolist(), scales.float(), strict=True):
            if c != clamped_at:
                clamped, clamped_at = [clamp(u + c) for u in normalized], c
            # Clean and attacked apart: vector instructions leave the last entries to a power that
            # rounds differently.
            v = torch.cat([_power(u, p) for u in clamped])
            largest = v[:, 1:].amax(dim=1)
            reordered.append(_changed(v, largest, self.own))
            both = self._probability_margins(
                v.index_select(0, self.used), largest[self.used], s, family.rivals
            )
            gap, margin = both.split(
                [both.shape[1] - len(self.least_margin), len(self.least_margin)], dim=1
            )
            gaps.append(gap)
            margin = margin.maximum(self.least_margin)
            margins.append(margin.view(len(s), self.points, len(self.rows)).amin(dim=1))
        candidates = torch.cat(
            [scales.reshape(-1, 1), pairs.repeat_interleave(scales.shape[1], dim=0)], dim=1
        ).double()
        return MarginTable(
            candidates,
            torch.cat(margins),
            torch.cat(gaps),
            torch.tensor(reordered).repeat_interleave(scales.shape[1]),
        )

    def _probability_margins(self, v: Tensor, largest: Tensor, s: Tensor, rivals: float) -> Tensor:
        """(S, R) r_own − r_other for r = softmax(s·v) with the differences of the other classes
        weighted by `rivals`.

        `largest` are the largest v of the other classes.
        """
        top = largest.maximum(v[:, 0])
        r = ((v - top.unsqueeze(1)) * s.view(-1, 1, 1)).exp_()
        total, r_own = r.sum(dim=2), r[:, :, 0]
        if rivals == 0:
            return (r_own - (total - r_own) / (v.shape[1] - 1)) / total
        other = torch.where(self.is_any, largest, v.gather(1, self.column).squeeze(1))
        r_other = ((other - top) * s.view(-1, 1)).exp_()
        if rivals == 1:
            return (r_own - r_other) / total
        mean = (total - r_own) / (v.shape[1] - 1)
        return (r_own - rivals * r_other - (1 - rivals) * mean) / total


def _power(u: Tensor, p: float) -> Tensor:
    """:func:`power`, in fewer operations if no entry is so near to 0 that it is linear there."""
    size = u.abs()
    return (size**p).copysign_(u) if size.numel() and float(size.amin()) > 1e-29 else power(u, p)


def _changed(v: Tensor, largest: Tensor, own: Tensor) -> int:
    """In how many rows class `own`, which is in column 0, is no longer predicted; `largest` are the
    largest others.

    Of classes that a clamp made equal the first is predicted; those before `own` are in columns 1
    to `own`.
    """
    rows = (largest >= v[:, 0]).nonzero().squeeze(1)
    if not len(rows):
        return 0
    v, largest, own = v[rows], largest[rows], own[rows]
    tied = (v[:, 1:] == v[:, :1]) & (torch.arange(1, v.shape[1]) <= own.unsqueeze(1))
    return int(((v[:, 0] < largest) | tied.any(dim=1)).sum())


def _swap_to_front(z: Tensor, own: Tensor) -> Tensor:
    """(R, K) with the column of class `own` swapped with column 0."""
    z = z.clone()
    first, mine = z[:, 0].clone(), z.gather(1, own.unsqueeze(1)).squeeze(1)
    z.scatter_(1, own.unsqueeze(1), first.unsqueeze(1))
    z[:, 0] = mine
    return z


def _column(classes: Tensor, own: Tensor) -> Tensor:
    """(R, 1) the column of each class after :func:`_swap_to_front`."""
    moved = torch.where(classes == 0, own, classes)
    return torch.where(classes == own, 0, moved).unsqueeze(1)
