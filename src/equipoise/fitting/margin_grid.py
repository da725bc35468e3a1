"""Margins of many logit maps at once, from cached logits.

Each step is computed as rarely as possible: the layer norm once, clamp and power once per (p, c), and only sums of
exponentials for every scale s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.fitting.cached_logits import ANY_CLASS, CachedLogits
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
    gaps: Tensor  # (G, N) margins of the clean images; the accurate model g decides from q ≥ gap on
    reordered: Tensor  # (G,) number of inputs, clean or attacked, on which the map changes the class of h

    def join(self, other: MarginTable) -> MarginTable:
        """The candidates of both tables."""
        return MarginTable(*map(torch.cat, zip(vars(self).values(), vars(other).values(), strict=True)))


class MarginGrid:
    """Computes a :class:`MarginTable` of candidates on the images of `logits`.

    With r the mapped probabilities of h, the gap of a clean image is r_top − r_j for the class j that g predicts, or
    without `use_accurate` for the runner-up. The margin of an attacked point is r_y − r_j for the class j that g
    predicts there, or for the worst class (ANY_CLASS).
    """

    def __init__(self, logits: CachedLogits, *, use_accurate: bool = True) -> None:
        self.rows = logits.survived.nonzero().squeeze(1)  # images that h survives
        self.points = logits.attacked.shape[0]
        attacked = logits.attacked[:, self.rows].reshape(-1, logits.clean.shape[1]).float()
        labels = logits.labels[self.rows].repeat(self.points)
        top = logits.clean.argmax(dim=1)
        predicted = logits.accurate_attacked[:, self.rows].reshape(-1)
        self.any_class = predicted == ANY_CLASS
        # All logits have their own class (the top one of clean images, the label of attacked ones) in column 0.
        self.own = (top, labels)
        both = (logits.clean.float(), attacked)
        self.logits = [_swap_to_front(z, own) for z, own in zip(both, self.own, strict=True)]
        self.gap_column = _column(logits.accurate, top) if use_accurate else None
        self.margin_column = _column(torch.where(self.any_class, labels, predicted), labels)
        # Where g is correct, no threshold loses the image.
        self.safe = (self.margin_column.squeeze(1) == 0) & ~self.any_class
        self.normalized: dict[float, list[Tensor]] = {}  # by unit

    def grid(self, family: MapFamily, scales: Tensor, powers: Tensor, shifts: Tensor) -> MarginTable:
        """Every combination; s varies fastest, then p, then c."""
        pairs = torch.cartesian_prod(shifts, powers)[:, [1, 0]]
        return self.at(family, pairs, scales.expand(len(pairs), -1))

    def one(self, family: MapFamily, candidate: Tensor) -> MarginTable:
        """A single candidate (s, p, c)."""
        return self.at(family, candidate[1:].unsqueeze(0), candidate[:1].unsqueeze(0))

    def at(self, family: MapFamily, pairs: Tensor, scales: Tensor) -> MarginTable:
        """(M, 2) pairs (p, c), each with its own (M, S) scales: G = M·S candidates."""
        if family.unit not in self.normalized:
            self.normalized[family.unit] = [centred(z, family.unit) if family.unit else layer_norm(z)
                                            for z in self.logits]
        clean, attacked = self.normalized[family.unit]
        clamp = CLAMPS[family.clamp]
        margins, gaps, reordered = [], [], []
        for (p, c), s in zip(pairs.tolist(), scales.float(), strict=True):
            v, w = (power(clamp(u + c), p) for u in (clean, attacked))
            other = v[:, 1:].amax(dim=1) if self.gap_column is None else v.gather(1, self.gap_column).squeeze(1)
            gaps.append(_probability_margin(v, other, s, family.rivals))
            rival = torch.where(self.any_class, w[:, 1:].amax(dim=1), w.gather(1, self.margin_column).squeeze(1))
            margin = torch.where(self.safe, torch.inf, _probability_margin(w, rival, s, family.rivals))
            margins.append(margin.view(len(s), self.points, len(self.rows)).amin(dim=1))
            changed = sum(_changed(u, own).sum() for u, own in zip((v, w), self.own, strict=True))
            reordered.append(torch.as_tensor(changed).expand(len(s)))
        candidates = torch.cat([scales.reshape(-1, 1), pairs.repeat_interleave(scales.shape[1], dim=0)], dim=1).double()
        return MarginTable(candidates, torch.cat(margins), torch.cat(gaps), torch.cat(reordered))


def _changed(u: Tensor, own: Tensor) -> Tensor:
    """(R,) where class `own`, which is in column 0, is no longer predicted.

    Of classes that a clamp made equal the first is predicted; those before `own` are in columns 1 to `own`.
    """
    tied = (u[:, 1:] == u[:, :1]) & (torch.arange(1, u.shape[1]) <= own.unsqueeze(1))
    return (u[:, 0] < u[:, 1:].amax(dim=1)) | tied.any(dim=1)


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


def _probability_margin(v: Tensor, other: Tensor, s: Tensor, rivals: float) -> Tensor:
    """(S, R) r_own − r_other for r = softmax(s·v) with the differences of the other classes weighted by `rivals`."""
    top = v.amax(dim=1)
    total = ((v - top.unsqueeze(1)) * s.view(-1, 1, 1)).exp_().sum(dim=2)
    r_own, r_other = (((u - top) * s.view(-1, 1)).exp_() for u in (v[:, 0], other))
    if rivals == 1:
        return (r_own - r_other) / total
    mean = (total - r_own) / (v.shape[1] - 1)
    return (r_own - rivals * r_other - (1 - rivals) * mean) / total
