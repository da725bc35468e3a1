"""MixedNUTS [Bai2024nuts]: attack the robust model once, then find the map and the weight that keep a promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise import checks, models
from equipoise.checks import InputError
from equipoise.data import Dataset
from equipoise.fit.cache import ANY, Cache, checked
from equipoise.fit.points import PAIR_ALPHA, Bench, Strength
from equipoise.fit.promise import Target, lose_at_most, threshold
from equipoise.fit.search import FRAGILE, OBJECTIVES, RULES, Choice, Search, families
from equipoise.fit.tables import Family, Tabulate
from equipoise.mixing import Fitted, LogitMap, MixedClassifier, Point
from equipoise.mixing.frontier import Frontier, non_dominated
from equipoise.mixing.logit_maps import CLAMPS
from equipoise.threat import Threat

POINTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of robust accuracy: the targets of a frontier
AGAINST = ("any", "pair")


@dataclass(frozen=True)
class Settings:
    """How to search; the defaults serve any pair."""

    objective: str = "mixture"
    clamp: str = "gelu-monotone"
    rule: str = "auto"
    against: str = "any"
    rounds: int = 1
    seed: int = 0
    strength: Strength = field(default_factory=Strength)
    like: LogitMap | None = None  # the map of a similar mixture: only the threshold is fitted

    def __post_init__(self) -> None:
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("clamp", self.clamp, CLAMPS)
        checks.one_of("rule", self.rule, RULES)
        checks.one_of("against", self.against, AGAINST)
        checks.whole("rounds", self.rounds)


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
    search: Search
    cache: Cache = field(repr=False)


def fit(
    accurate: nn.Module, robust: nn.Module, data: Dataset, *, threat: Threat, target: Target | None = None,
    device: torch.device | str = "cpu", batch_size: int = 128, settings: Settings | None = None,
    cache: Cache | None = None, keep: Callable[[Cache], None] | None = None,
) -> Fit:
    """The most accurate mixture that loses at most so much robust accuracy.

    The points where the robust model's margin is smallest are found once; then candidates are tried on
    cached logits. The map is chosen on one half of the images and the threshold on the other, with a
    finite-sample correction, so that the promise holds in expectation for a further image and the attack
    used here. If the mixture is not more accurate than the robust model on that other half, the robust
    model is returned (α = 1) and `helped` is False; targets that allow a larger loss may still help, and are its
    frontier then.

    Args:
        accurate: g, images in [0, 1] → logits, or classes.
        robust: h, images → logits. Without gradients it is attacked by random search.
        data: images that are never evaluated on; at least 50, better 1000.
        threat: what the adversary may do.
        target: what may be lost; one point of robust accuracy if not given.
        device: where to compute.
        batch_size: images at a time; halved when memory runs out.
        settings: how to search.
        cache: logits of an earlier fit on the same images.
        keep: called with the logits after the first attack, to be handed in as `cache` next time.
    """
    settings = settings or Settings()
    target = target or lose_at_most(1.0)
    checks.require(models.weights_digest(accurate) != models.weights_digest(robust) or not list(robust.parameters()),
                   "accurate and robust", "be different models", "equal weights")
    bench = Bench(accurate, robust, data, threat, torch.device(device), settings.seed, batch_size, settings.strength)
    notes: list[str] = []
    bench.probe()
    if not bench.strength.gradient_free and not bench.has_gradients():
        notes.append("the robust model gives no gradients: its margins were attacked by random search (Square)")
        bench = dataclasses.replace(bench, strength=dataclasses.replace(bench.strength, gradient_free=True))
    if cache is None:
        cache = _attacked(bench, settings)
        if keep is not None:
            keep(cache)
    cache = checked(cache)
    search, cache = _searched(bench, cache, target, settings, notes)
    made = _Promised(search, cache, target, settings)
    return made.fit(accurate, robust, data, notes)


def _attacked(bench: Bench, settings: Settings) -> Cache:
    cache = bench.clean()
    checked(cache.join(cache.clean.unsqueeze(0)))  # what is wrong without an attack is said before it
    h, g = bench.nearest(LogitMap(1.0, 1.0, 0.0, "linear"))
    cache = checked(cache.join(h, g if settings.against == "pair" else None))
    if settings.rule == "nuts":
        return cache
    # A switch asks how sure h is of its class, so the points that make it least sure are wanted too.
    return _join(bench, cache, _switch(cache), both=False, said=settings.against == "pair")


def _switch(cache: Cache) -> LogitMap:
    """The plain switch: how probable h finds its first class."""
    unit = float(cache.clean.std(dim=1).mean())
    return LogitMap(unit, 1.0, 0.0, "linear", rivals=0.0, unit=unit)


def _searched(
    bench: Bench, cache: Cache, target: Target, settings: Settings, notes: list[str]
) -> tuple[Search, Cache]:
    """Search, attack what was found, search again with the new points in the pool [Bai2024nuts, D.9]."""
    both = settings.against == "pair"
    if both and settings.rule != "switch":
        cache = _join(bench, cache, LogitMap(1.0, 1.0, 0.0, "linear"), both)
    if both and settings.rule != "nuts":
        cache = _join(bench, cache, _switch(cache), both)
    for number in range(settings.rounds + 1):
        half = cache.halves(settings.seed)[0]
        search = Search(half, families(settings.rule, half, settings.clamp), settings.objective, settings.seed)
        search.widen(target)
        search.refine(target)
        choice = search.choose(target)
        if settings.like is not None or choice is None:
            break
        if number < settings.rounds:
            chosen = choice.map()
            notes.append(f"round {number + 1}: {chosen.extra_repr()} reached {100 * choice.worth:.1f} % on the "
                         "choosing half; its mapped model was attacked again")
            cache = _join(bench, cache, chosen, both)
    notes += search.notes
    return search, cache


def _join(bench: Bench, cache: Cache, logit_map: LogitMap, both: bool, said: bool | None = None) -> Cache:
    """Attack the images that still stand; the others keep a point they have."""
    rows = cache.standing.nonzero().squeeze(1)
    if not len(rows):
        raise InputError("the robust model must be right on at least one attacked image, got none: there is no "
                         "robustness to keep")
    h, g = bench.on(rows).nearest(logit_map, both=both)
    points = cache.attacked[:1].expand(len(h), -1, -1).clone()
    points[:, rows] = h
    if not (both if said is None else said):
        return checked(cache.join(points))
    named = torch.full((len(h), len(cache)), ANY)
    named[:, rows] = g
    return checked(cache.join(points, named))


@dataclass
class _Promised:
    """From the search on one half to thresholds on the other."""

    search: Search
    cache: Cache
    target: Target
    settings: Settings

    def __post_init__(self) -> None:
        self.kept = self.cache.halves(self.settings.seed)[1]
        self.own = float((self.kept.clean.argmax(dim=1) == self.kept.labels).float().mean())

    def point(self, target: Target) -> tuple[Point, float] | None:
        """The map of the choosing half with the threshold of the other, and the clean accuracy there."""
        like = self.settings.like
        choice = self.search.choose(target) if like is None else _taken(like)
        if choice is None:
            return None
        look = Tabulate(self.kept)
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
        look = Tabulate(self.cache)
        table = look.one(Family("linear"), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
        q = float(threshold(table.margins[0], self.target.allowed(len(self.cache), look.kept)))
        return min(1 / (1 + q), PAIR_ALPHA)

    def fit(self, accurate: nn.Module, robust: nn.Module, data: Dataset, notes: list[str]) -> Fit:
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
                fitted=Fitted.on(data, promise)).eval()
            return Fit(mixture, True, promise, numbers | {"clean": point.clean, "q": q, "alpha": point.alpha},
                       rejected, notes, self.target, self.search, self.cache)
        promise = f"no mixture helps: {why}; this is the robust model"
        alone = MixedClassifier(accurate, robust, 1.0, hard=True, frontier=self.frontier(),
                                fitted=Fitted.on(data, promise)).eval()
        return Fit(alone, False, promise, numbers | {"clean": own, "q": 0.0, "alpha": 1.0}, rejected, notes,
                   self.target, self.search, self.cache)


def _taken(like: LogitMap) -> Choice:
    s, p, c, rivals, unit = like.numbers.tolist()
    family = Family(like.clamp, rivals, 0.0 if like.normed else unit)
    return Choice(family, torch.tensor([s, p, c], dtype=torch.float64), 0.0)


def _against(mode: str) -> str:
    return {"any": "whatever the accurate model answers at the attacked points",
            "pair": "against an attack on both models at once"}[mode]
