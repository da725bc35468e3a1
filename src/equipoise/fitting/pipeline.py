"""Our rules: attack the robust model, search a map on half of the images, calibrate it on the
others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from equipoise.core.device import single_thread
from equipoise.core.results import FitSummary
from equipoise.data import Dataset
from equipoise.fitting.cached_logits import CachedLogits, load_logits, save_logits
from equipoise.fitting.conformal import Target, lose_at_most, threshold
from equipoise.fitting.margin_attack import PAIR_ALPHA, MarginAttack
from equipoise.fitting.margin_grid import MapFamily, MarginGrid
from equipoise.fitting.search import MIN_Q, MapSearch, SearchSpace, SelectedMap, families
from equipoise.mixing import FrontierMixture, LogitMap, MixedClassifier, Provenance
from equipoise.mixing.cascade import mixture_at
from equipoise.mixing.logit_maps import confidence_switch, layer_norm_map
from equipoise.mixing.provenance import RULES, Frontier, pareto_frontier

FRONTIER_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # points of robust accuracy
ADVERSARIES = {
    "any": "whatever the accurate model predicts at the attacked points",
    "pair": "against an attack on both models at once",
}


@dataclass(frozen=True, eq=False)
class ReusedMap:
    """The map of another mixture, and the images that it was fitted on, if known."""

    logit_map: LogitMap
    provenance: Provenance | None = None

    def selecting(self, data: Dataset) -> Tensor | None:
        """Positions of the images of `data` that selected the map."""
        return None if self.provenance is None else self.provenance.selecting(data)


def _family(logit_map: LogitMap) -> MapFamily:
    own = logit_map.settings
    return MapFamily(own.clamp, own.rivals, own.unit or 0.0)


class Calibration:
    """Thresholds for the maps of a search (or for `like`), on the half of the images that did not
    select them.

    `selecting` are positions of images that selected the map `like`, which are left out.
    """

    def __init__(
        self,
        search: MapSearch,
        logits: CachedLogits,
        target: Target,
        like: LogitMap | None = None,
        selecting: Tensor | None = None,
    ) -> None:
        self.search, self.all_logits, self.target = search, logits, target
        self._points: dict[Target, tuple[FrontierMixture, float] | None] = {}
        self.like = None
        if like is not None:
            own = like.settings
            candidate = torch.tensor([own.scale, own.power, own.shift], dtype=torch.float64)
            self.like = SelectedMap(_family(like), candidate, 0.0)
        half = logits.halves(search.seed)[1]
        self.logits = half if selecting is None else half.take(~torch.isin(half.index, selecting))
        self.left_out = len(half) - len(self.logits)
        self.grid = MarginGrid(self.logits)
        self.count, self.survived = len(self.logits), len(self.grid.rows)
        accurate_correct = self.logits.accurate == self.logits.labels
        self.robust_clean, self.accurate_clean = (
            float(correct.float().mean()) if self.count else 0.0
            for correct in (self.logits.correct, accurate_correct)
        )

    def threshold(self, selected: SelectedMap, losses: int) -> tuple[float, float]:
        """The threshold q at which a map loses this many images, and the clean accuracy of the
        mixture with it."""
        table = self.grid.one(selected.family, selected.candidate)
        q = float(threshold(table.margins[0], losses))
        accurate_correct = self.logits.accurate == self.logits.labels
        correct = torch.where(table.gaps[0] <= q, accurate_correct, self.logits.correct)
        return q, float(correct.float().mean())

    def select(self, target: Target) -> SelectedMap | None:
        """The reused map, or the one that the search selects for a target; None if all candidates
        were rejected."""
        return self.like or self.search.select(target)

    def point(self, target: Target) -> tuple[FrontierMixture, float] | None:
        """The calibrated map for a target, and its threshold; None if there is none."""
        if target not in self._points:
            self._points[target] = self._calibrate(target)
        return self._points[target]

    def _calibrate(self, target: Target) -> tuple[FrontierMixture, float] | None:
        selected = self.select(target)
        if selected is None or self.count == 0:
            return None
        q, clean = self.threshold(selected, target.allowed(self.count, self.survived))
        if not MIN_Q <= q <= 1 - MIN_Q:  # a selected map is not saturated
            return None
        s, p, c = selected.candidate.tolist()
        family = selected.family
        # A share of the robust images is at most the same share of all images. How many of these
        # are robust is only known for the calibration half, for which nothing is promised.
        return FrontierMixture(
            target.share,
            clean,
            1 / (1 + q),
            family.clamp,
            s,
            p,
            c,
            family.rivals,
            family.unit,
            selected.first_q,
            selected.first_scale,
        ), q

    def frontier(self, *mixtures: FrontierMixture) -> Frontier:
        """The Pareto frontier of these mixtures and those for other targets, if more accurate than
        the robust model."""
        others = (
            self.point(lose_at_most(lost, self.target.confidence)) for lost in FRONTIER_TARGETS
        )
        candidates = [*mixtures, *(other[0] for other in others if other is not None)]
        return pareto_frontier(
            mixture for mixture in candidates if mixture.clean > self.robust_clean
        )

    def surrogate_alpha(self) -> float:
        """α_d of the auxiliary mixture [Bai2024nuts, B.2.1]: the same promise with the layer norm
        alone.

        The published code, and rule paper with it, leaves the layer norm out. At most 0.9.
        """
        grid = MarginGrid(self.all_logits)
        table = grid.one(MapFamily("linear"), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
        q = float(
            threshold(table.margins[0], self.target.allowed(len(self.all_logits), len(grid.rows)))
        )
        return min(1 / (1 + q), PAIR_ALPHA)

    def failure(self, calibrated: tuple[FrontierMixture, float] | None) -> str | None:
        """Why no mixture helps; None if one does."""
        losses, target = self.target.allowed(self.count, self.survived), self.target
        if losses < 0:
            if target.least_images is None:
                return "that nothing is lost cannot be promised on any number of images"
            left_out = (
                f" ({self.left_out} others selected the map that is reused)"
                if self.left_out
                else ""
            )
            robust = (
                f", of which the robust model survives {self.survived}," if target.of_robust else ""
            )
            return (
                f"{self.count} images{left_out}{robust} are too few to promise {target} {target.kind}, which needs "
                f"at least {target.least_images}"
            )
        if losses >= self.survived:
            return (
                f"the target allows losing all {self.survived} of {self.count} images that the robust model "
                "survives, which the accurate model alone does"
            )
        worse = (
            f"the accurate model classifies {100 * self.accurate_clean:.1f} % of the clean images correctly"
            + (f", the robust model {100 * self.robust_clean:.1f} %")
        )
        is_worse = self.accurate_clean <= self.robust_clean
        if calibrated is None:
            if is_worse:
                return f"{worse}, so that there is nothing to gain"
            return self.no_threshold(losses)
        clean = calibrated[0].clean
        return (
            None
            if clean > self.robust_clean
            else (
                f"the best mixture classifies {100 * clean:.1f} % of the clean images that did not select it correctly, "
                f"the robust model {100 * self.robust_clean:.1f} %{f'; {worse}' if is_worse else ''}"
            )
        )

    def no_threshold(self, losses: int) -> str:
        """Why no map has a threshold that loses at most so many images, although the accurate model
        is better."""
        if self.like is not None:
            q = self.threshold(self.like, losses)[0]
            return (
                f"the threshold of the reused map is q = {q:.3g}, too near to {0 if q < 0.5 else 1}"
            )
        counts = self.search.rejected(self.target).items()
        return f"every candidate was rejected ({', '.join(f'{n} × {reason}' for reason, n in counts if n)})"


@dataclass(frozen=True, eq=False)
class CalibratedMixture:
    """A mixture with its promise, and the calibration that it came from."""

    mixture: MixedClassifier
    summary: FitSummary
    calibration: Calibration


@single_thread()
def calibrated_mixture(
    calibration: Calibration, attack: MarginAttack, notes: list[str], like: ReusedMap | None = None
) -> CalibratedMixture:
    """The mixture of the attacked models for the target, or the robust one alone (α = 1) with the
    reason as promise."""
    point = calibration.point(calibration.target)
    failure = calibration.failure(point)
    if failure is None and point is not None:
        best, q = point
        clean, alpha = best.clean, best.alpha
        target = calibration.target
        bound = "conformal risk control" if target.confidence is None else "an exact binomial bound"
        promise = (
            f"loses at most {target} {target.kind}, {ADVERSARIES[attack.settings.against]}, by {bound} on "
            f"{calibration.count} images that did not select the map"
        )
        mixture = mixture_at(
            best,
            attack.accurate,
            attack.robust,
            frontier=calibration.frontier(best),
            surrogate_alpha=calibration.surrogate_alpha(),
        )
    else:
        clean, q, alpha = calibration.robust_clean, 0.0, 1.0
        promise = f"no mixture helps: {failure}; this is the robust model"
        mixture = MixedClassifier(
            attack.accurate, attack.robust, alpha, hard=True, frontier=calibration.frontier()
        )
    rule = mixture.rule
    mixture.provenance = Provenance.of(
        attack.data,
        promise,
        rule,
        target=calibration.target,
        threat=attack.threat,
        seed=attack.settings.seed,
        like=None if like is None else like.provenance,
    )
    summary = FitSummary(
        helped=failure is None,
        promise=promise,
        clean=clean,
        robust_clean=calibration.robust_clean,
        robust_attacked=calibration.survived / max(calibration.count, 1),
        q=q,
        alpha=alpha,
        rejected={}
        if calibration.like is not None
        else calibration.search.rejected(calibration.target),
        notes=tuple(notes),
        rule=rule,
        method=RULES[rule],
        promised=calibration.target if failure is None else None,
        images=calibration.count,
    )
    return CalibratedMixture(mixture.eval(), summary, calibration)


def fit_mixture(
    attack: MarginAttack, target: Target, folder: Path | None = None, like: ReusedMap | None = None
) -> CalibratedMixture:
    """Fit the most accurate mixture that loses at most `target`.

    The points where the margin of the robust model is smallest are found once; candidates are then
    tried on cached logits. The map is selected on one half of the images and the threshold on the
    other, with a finite-sample correction, so that the promise holds, in expectation or with the
    confidence of the target, for further images and the attack used here. If the mixture is not
    more accurate than the robust model on that other half, the result is the robust model (α = 1).

    With a folder, logits are kept after the first attack, and an interrupted fit resumes from
    there; the map `like` is used instead of a searched one, and the images that selected it do not
    set its threshold.
    """
    notes: list[str] = []
    attack, logits = attacked_logits(attack, folder, notes)
    search, logits = search_map(
        attack, logits, target, notes, None if like is None else like.logit_map
    )
    if like is None:
        return calibrated_mixture(Calibration(search, logits, target), attack, notes)
    calibration = Calibration(search, logits, target, like.logit_map, like.selecting(attack.data))
    if calibration.left_out:
        notes.append(
            f"{calibration.left_out} of the {calibration.count + calibration.left_out} images for the "
            "threshold selected the map that is reused, and were left out"
        )
    return calibrated_mixture(calibration, attack, notes, like)


def attacked_logits(
    attack: MarginAttack, folder: Path | None, notes: list[str]
) -> tuple[MarginAttack, CachedLogits]:
    """The logits after the first attack, kept in the folder, and the attack: by random search if h
    has no gradients."""
    attack.check_inputs()
    if not attack.settings.gradient_free and not attack.has_gradients():
        notes.append(
            "the robust model has no gradients: its margins were attacked by random search (Square)"
        )
        attack = replace(attack, settings=replace(attack.settings, gradient_free=True))
    logits = None if folder is None else load_logits(folder, attack.data)
    if logits is None:
        logits = _first_attack(attack)
        if folder is not None:
            save_logits(folder, logits)
    return attack, logits.checked()


def _first_attack(attack: MarginAttack) -> CachedLogits:
    clean = attack.clean_logits()
    clean.with_points(
        clean.clean.unsqueeze(0)
    ).checked()  # errors that need no attack are raised before it
    h, g, first = attack.run(layer_norm_map())
    logits = clean.with_points(h, g if attack.settings.against == "pair" else None, first).checked()
    if attack.settings.rule in ("nuts", "paper"):
        return logits
    # A confidence switch depends on the top probability only: it needs the points where that is
    # lowest, too.
    return _attack_survivors(attack, logits, _confidence(logits), both=False)


def _confidence(logits: CachedLogits) -> LogitMap:
    """The plain confidence switch: the probability that h gives its first class."""
    unit = float(logits.clean.std(dim=1).mean())
    return confidence_switch(unit, unit)


def search_map(
    attack: MarginAttack,
    logits: CachedLogits,
    target: Target,
    notes: list[str],
    like: LogitMap | None = None,
) -> tuple[MapSearch, CachedLogits]:
    """Search, attack the selected map, and search again with the new points added [Bai2024nuts,
    D.9].

    With a reused map nothing is searched: it is the only candidate.
    """
    settings, both = attack.settings, attack.settings.against == "pair"
    if both and settings.rule != "switch":
        logits = _attack_survivors(attack, logits, layer_norm_map(), both=True)
    if both and settings.rule != "nuts":
        logits = _attack_survivors(attack, logits, _confidence(logits), both=True)
    if like is not None:
        own = like.settings
        alone = SearchSpace((own.scale,) * 2, (own.power,) * 2, (own.shift,) * 2, steps=1)
        half = logits.halves(settings.seed)[0]
        return MapSearch(
            half, [_family(like)], settings.search_objective, settings.seed, alone
        ), logits
    for number in range(settings.rounds + 1):
        half = logits.halves(settings.seed)[0]
        search = MapSearch(
            half,
            families(settings.rule, half, settings.search_clamp),
            settings.search_objective,
            settings.seed,
        )
        selected = search.run(target)
        if selected is None:
            break
        if number < settings.rounds:
            logit_map = selected.family.map(selected.candidate)
            notes.append(
                f"round {number + 1}: {logit_map.extra_repr()} reached {100 * selected.score:.1f} % on the "
                "search half; the mapped model was attacked again"
            )
            logits = _attack_survivors(attack, logits, logit_map, both=both)
    notes += search.notes
    return search, logits


def _attack_survivors(
    attack: MarginAttack, logits: CachedLogits, logit_map: LogitMap, *, both: bool
) -> CachedLogits:
    """Attack the images that h still survives and add the points; the other images repeat a point
    they have."""
    rows = logits.survived.nonzero().squeeze(1)
    points = replace(attack, data=attack.data.take(rows)).run(logit_map, both=both)
    return logits.with_points_of(
        rows, points, use_accurate=attack.settings.against == "pair"
    ).checked()
