"""From a search on one half of the images to a mixture with a promise made on the other, and a guard."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.data import Dataset
from equipoise.fitting.cache import Cache
from equipoise.fitting.conformal import Target, lose_at_most, threshold
from equipoise.fitting.margin_attack import PAIR_ALPHA
from equipoise.fitting.margin_grid import Family, MarginGrid
from equipoise.fitting.search import FRAGILE, ChosenMap, MapSearch
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import LogitMap, MixedClassifier, Point, Provenance
from equipoise.mixing.frontier import Frontier, non_dominated

POINTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of robust accuracy: the targets of a frontier


@dataclass
class Fit:
    """What was fitted, what it promises, and what was seen on the way."""

    mixture: MixedClassifier
    helped: bool
    promise: str
    numbers: dict[str, float]
    rejected: dict[str, int]
    notes: list[str]
    target: Target
    search: MapSearch
    cache: Cache = field(repr=False)


@dataclass
class Calibration:
    """From the search on one half to thresholds on the other."""

    search: MapSearch
    cache: Cache
    target: Target
    settings: FitSettings

    def __post_init__(self) -> None:
        self.kept = self.cache.halves(self.settings.seed)[1]
        self.own = float((self.kept.clean.argmax(dim=1) == self.kept.labels).float().mean())

    def point(self, target: Target) -> tuple[Point, float] | None:
        """The map of the choosing half with the threshold of the other, and the clean accuracy there."""
        like = self.settings.like
        choice = self.search.choose(target) if like is None else _taken(like)
        if choice is None:
            return None
        look = MarginGrid(self.kept)
        table = look.one(choice.family, choice.candidate)
        q = float(threshold(table.margins[0], target.allowed(len(self.kept), look.kept)))
        if not FRAGILE <= q <= 1 - FRAGILE:
            return None
        s, p, c = choice.candidate.tolist()
        share = target.share * (look.kept / len(self.kept) if target.of_robust else 1)
        family = choice.family
        return Point(share, self._clean(table.gaps[0] <= q), 1 / (1 + q), family.clamp, s, p, c, family.rivals,
                     family.unit), q

    def _clean(self, by_accurate: Tensor) -> float:
        right = self.kept.clean.argmax(dim=1) == self.kept.labels
        if self.kept.accurate is not None:
            right = torch.where(by_accurate, self.kept.accurate == self.kept.labels, right)
        return float(right.float().mean())

    def frontier(self, *points: Point) -> Frontier:
        """These points and one per target that the images allow to promise, if they help and none is beaten."""
        found = (self.point(lose_at_most(lost)) for lost in POINTS)
        every = [*points, *(made[0] for made in found if made is not None)]
        return non_dominated(point for point in every if point.clean > self.own)

    def surrogate_alpha(self) -> float:
        """α_d of the auxiliary mixture: the same promise with the layer norm alone [Bai2024nuts, B.2.1].

        Not above 0.9, where attacks were measured to be strongest.
        """
        look = MarginGrid(self.cache)
        table = look.one(Family("linear"), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
        q = float(threshold(table.margins[0], self.target.allowed(len(self.cache), look.kept)))
        return min(1 / (1 + q), PAIR_ALPHA)

    def fit(self, accurate: nn.Module, robust: nn.Module, data: Dataset, notes: list[str]) -> Fit:
        """The mixture for the target, or the robust model alone and why."""
        kept, look_kept = len(self.kept), int(self.kept.standing.sum())
        own = self.own
        numbers = {"robust_clean": own, "robust_attacked": look_kept / kept}
        rejected = self.search.rejected(self.target)
        made = self.point(self.target)
        if self.target.allowed(kept, look_kept) < 0:
            why = f"{kept} images are too few to promise {self.target}" if self.target.share > 0 else (
                "that nothing is lost cannot be promised on any number of images")
        elif self.target.allowed(kept, look_kept) >= look_kept:
            why = (f"the target lets all {look_kept} of {kept} images go that the robust model keeps, which the "
                   "accurate model alone does")
        elif made is None:
            why = "every candidate was rejected (" + ", ".join(f"{n} × {r}" for r, n in rejected.items() if n) + ")"
        elif made[0].clean <= own:
            why = (f"the best mixture answers {100 * made[0].clean:.1f} % of the clean images that did not choose it, "
                   f"the robust model {100 * own:.1f} %")
        else:
            point, q = made
            promise = (f"loses at most {self.target} in expectation, {_against(self.settings.against)}, "
                       f"by conformal risk control on {kept} images that did not choose the map")
            mixture = MixedClassifier(
                accurate, robust, point.alpha, logit_map=point.logit_map(), hard=True,
                surrogate_alpha=self.surrogate_alpha(), frontier=self.frontier(point),
                fitted=Provenance.on(data, promise)).eval()
            return Fit(mixture, True, promise, numbers | {"clean": point.clean, "q": q, "alpha": point.alpha},
                       rejected, notes, self.target, self.search, self.cache)
        promise = f"no mixture helps: {why}; this is the robust model"
        alone = MixedClassifier(accurate, robust, 1.0, hard=True, frontier=self.frontier(),
                                fitted=Provenance.on(data, promise)).eval()
        return Fit(alone, False, promise, numbers | {"clean": own, "q": 0.0, "alpha": 1.0}, rejected, notes,
                   self.target, self.search, self.cache)


def _taken(like: LogitMap) -> ChosenMap:
    s, p, c, rivals, unit = like.numbers.tolist()
    family = Family(like.clamp, rivals, 0.0 if like.normed else unit)
    return ChosenMap(family, torch.tensor([s, p, c], dtype=torch.float64), 0.0)


def _against(mode: str) -> str:
    return {"any": "whatever the accurate model answers at the attacked points",
            "pair": "against an attack on both models at once"}[mode]
