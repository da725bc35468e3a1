"""Margins of many maps at once, from cached logits.

Everything that depends on fewer numbers is computed fewer times: the layer norm once, the clamp and the power
once per (p, c), and only sums of exponentials for every scale s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.fitting.cache import ANY, Cache
from equipoise.mixing import LogitMap
from equipoise.mixing.logit_maps import CLAMPS, centred, layer_norm, power


@dataclass(frozen=True)
class Family:
    """Maps that differ in s, p and c only, or in s only."""

    clamp: str = "gelu-monotone"
    rivals: float = 1.0
    unit: float = 0.0  # 0 is the layer norm
    free: bool = True  # p and c are searched; otherwise they stay 1 and 0

    def __str__(self) -> str:
        kind = "maps that weigh every class" if self.rivals else "maps that ask only how sure the robust model is"
        return f"{kind}, of {'its logits' if self.unit else 'its normed logits'}{'' if self.free else ', one number'}"

    def map(self, candidate: Tensor) -> LogitMap:
        """(s, p, c) → the map."""
        s, p, c = candidate.tolist()
        return LogitMap(s, p, c, self.clamp, rivals=self.rivals, unit=self.unit or None)


@dataclass(frozen=True, eq=False)
class MarginTable:
    """G maps on the images of a cache."""

    candidates: Tensor  # (G, 3): s, p, c
    margins: Tensor  # (G, R) of every image that h keeps: the threshold from which on it is lost
    gaps: Tensor  # (G, N) on clean images: the threshold from which on g answers instead of h
    reordered: Tensor  # (G,) images, clean or attacked, on which the map changes h's answer

    def __len__(self) -> int:
        return len(self.candidates)

    def join(self, other: MarginTable) -> MarginTable:
        """Both."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("candidates", "margins", "gaps", "reordered"))
        return MarginTable(*(torch.cat(pair) for pair in pairs))


class MarginGrid:
    """Candidates → :class:`MarginTable`, for one cache.

    A clean image's gap is r_top − r_j for the class j that g says, or without g for the runner-up; the margin
    of an attacked point is r_y − r_j for what g says there, or for the worst that g could say.
    """

    def __init__(self, cache: Cache) -> None:
        kept = cache.standing.nonzero().squeeze(1)
        self.points, self.kept, self.rows = cache.attacked.shape[0], len(kept), kept
        at = cache.attacked[:, kept].reshape(-1, cache.clean.shape[1]).float()
        y = cache.labels[kept].repeat(self.points)
        top = cache.clean.argmax(dim=1)
        self.logits = [_own_first(z, own) for z, own in ((cache.clean.float(), top), (at, y))]
        self.rival = None if cache.accurate is None else _column(cache.accurate, top)
        said = None if cache.said is None else cache.said[:, kept].reshape(-1)
        self.free = None if said is None else said == ANY
        self.said = None if said is None else _column(torch.where(said == ANY, y, said), y)
        self.scaled: dict[float, list[Tensor]] = {}

    def grid(self, family: Family, scales: Tensor, powers: Tensor, shifts: Tensor) -> MarginTable:
        """Every combination, s fastest, then p, then c."""
        pairs = torch.cartesian_prod(shifts, powers)[:, [1, 0]]
        return self.at(family, pairs, scales.expand(len(pairs), -1))

    def one(self, family: Family, candidate: Tensor) -> MarginTable:
        """A single candidate (s, p, c)."""
        return self.at(family, candidate[1:].unsqueeze(0), candidate[:1].unsqueeze(0))

    def at(self, family: Family, pairs: Tensor, scales: Tensor) -> MarginTable:
        """(M, 2) pairs (p, c), each with its (M, S) scales: G = M·S candidates."""
        if family.unit not in self.scaled:
            self.scaled[family.unit] = [centred(z, family.unit) if family.unit else layer_norm(z) for z in self.logits]
        clean, attacked = self.scaled[family.unit]
        clamp = CLAMPS[family.clamp]
        margins, gaps, reordered = [], [], []
        for (p, c), s in zip(pairs.tolist(), scales.float(), strict=True):
            v, w = (power(clamp(u + c), p) for u in (clean, attacked))
            gaps.append(self._gap(v, s, family.rivals))
            margins.append(self._margin(w, s, family.rivals))
            changed = sum((u[:, 0] < u[:, 1:].amax(dim=1)).sum() for u in (v, w))
            reordered.append(torch.as_tensor(changed).expand(len(s)))
        spread = pairs.repeat_interleave(scales.shape[1], dim=0)
        candidates = torch.cat([scales.reshape(-1, 1), spread], dim=1).double()
        return MarginTable(candidates, torch.cat(margins), torch.cat(gaps), torch.cat(reordered))

    def _gap(self, v: Tensor, s: Tensor, rivals: float) -> Tensor:
        rival = v[:, 1:].amax(dim=1) if self.rival is None else v.gather(1, self.rival).squeeze(1)
        return _margin(v, rival, s, rivals)

    def _margin(self, w: Tensor, s: Tensor, rivals: float) -> Tensor:
        """(S, kept) of every image the smallest over its points."""
        worst = w[:, 1:].amax(dim=1)
        if self.said is None or self.free is None:
            margin = _margin(w, worst, s, rivals)
        else:
            named = w.gather(1, self.said).squeeze(1)
            margin = _margin(w, torch.where(self.free, worst, named), s, rivals)
            # Where g is right no threshold loses the image.
            margin = torch.where((self.said.squeeze(1) == 0) & ~self.free, torch.inf, margin)
        return margin.view(len(s), self.points, self.kept).amin(dim=1)


def _own_first(z: Tensor, own: Tensor) -> Tensor:
    """(R, K) with the column of `own` swapped to the front."""
    z = z.clone()
    first, mine = z[:, 0].clone(), z.gather(1, own.unsqueeze(1)).squeeze(1)
    z.scatter_(1, own.unsqueeze(1), first.unsqueeze(1))
    z[:, 0] = mine
    return z


def _column(classes: Tensor, own: Tensor) -> Tensor:
    """(R, 1) where a class stands after :func:`_own_first`."""
    moved = torch.where(classes == 0, own, classes)
    return torch.where(classes == own, 0, moved).unsqueeze(1)


def _margin(v: Tensor, rival: Tensor, s: Tensor, rivals: float) -> Tensor:
    """(S, R) r_own − r_rival under softmax(s·v) with rivals evened out, own being the first column."""
    top = v.amax(dim=1)
    weights = ((v - top.unsqueeze(1)) * s.view(-1, 1, 1)).exp_().sum(dim=2)
    own, other = (((u - top) * s.view(-1, 1)).exp_() for u in (v[:, 0], rival))
    if rivals == 1:
        return (own - other) / weights
    even = (weights - own) / (v.shape[1] - 1)
    return (own - rivals * other - (1 - rivals) * even) / weights
