"""MixedNUTS [Bai2024nuts]: attack the robust model, search a map on half of the images, calibrate it on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from equipoise.core.results import FitSummary
from equipoise.fitting.cached_logits import ANY_CLASS, PAIR_ALPHA, CachedLogits, MarginAttack, load_logits, save_logits
from equipoise.fitting.conformal import Target, lose_at_most, threshold
from equipoise.fitting.margin_grid import MapFamily, MarginGrid
from equipoise.fitting.search import MIN_Q, MapSearch, SelectedMap, families
from equipoise.mixing import FrontierMixture, LogitMap, MixedClassifier, Provenance
from equipoise.mixing.provenance import Frontier, pareto_frontier

FRONTIER_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # points of robust accuracy
ADVERSARIES = {"any": "whatever the accurate model predicts at the attacked points",
               "pair": "against an attack on both models at once"}


class Calibration:
    """Thresholds for the maps of a search (or for `like`), on the half of the images that did not select them."""

    def __init__(self, search: MapSearch, logits: CachedLogits, target: Target, like: LogitMap | None = None) -> None:
        self.search, self.all_logits, self.target = search, logits, target
        self.like = None
        if like is not None:
            own = like.settings
            candidate = torch.tensor([own.scale, own.power, own.shift], dtype=torch.float64)
            self.like = SelectedMap(MapFamily(own.clamp, own.rivals, own.unit or 0.0), candidate, 0.0)
        self.logits = logits.halves(search.seed)[1]
        self.grid = MarginGrid(self.logits)
        self.count, self.survived = len(self.logits), len(self.grid.rows)
        self.robust_clean = float(self.logits.correct.float().mean())

    def threshold(self, selected: SelectedMap, losses: int) -> tuple[float, float]:
        """The threshold q at which a map loses this many images, and the clean accuracy of the mixture with it."""
        table = self.grid.one(selected.family, selected.candidate)
        q = float(threshold(table.margins[0], losses))
        accurate_correct = self.logits.accurate == self.logits.labels
        correct = torch.where(table.gaps[0] <= q, accurate_correct, self.logits.correct)
        return q, float(correct.float().mean())

    def point(self, target: Target) -> tuple[FrontierMixture, float] | None:
        """The calibrated map for a target, and its threshold; None if there is none."""
        selected = self.like or self.search.select(target)
        if selected is None:
            return None
        q, clean = self.threshold(selected, target.allowed(self.count, self.survived))
        if not MIN_Q <= q <= 1 - MIN_Q:
            return None
        s, p, c = selected.candidate.tolist()
        share = target.share * (self.survived / self.count if target.of_robust else 1)
        family = selected.family
        return FrontierMixture(share, clean, 1 / (1 + q), family.clamp, s, p, c, family.rivals, family.unit), q

    def frontier(self, *mixtures: FrontierMixture) -> Frontier:
        """The Pareto frontier of these mixtures and those for other targets, if more accurate than the robust model."""
        others = (self.point(lose_at_most(lost)) for lost in FRONTIER_TARGETS)
        candidates = [*mixtures, *(other[0] for other in others if other is not None)]
        return pareto_frontier(mixture for mixture in candidates if mixture.clean > self.robust_clean)

    def surrogate_alpha(self) -> float:
        """α_d of the auxiliary mixture: the same promise with the layer norm alone [Bai2024nuts, B.2.1].

        At most 0.9, where attacks were measured to be strongest.
        """
        grid = MarginGrid(self.all_logits)
        table = grid.one(MapFamily("linear"), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
        q = float(threshold(table.margins[0], self.target.allowed(len(self.all_logits), len(grid.rows))))
        return min(1 / (1 + q), PAIR_ALPHA)

    def failure(self, calibrated: tuple[FrontierMixture, float] | None) -> str | None:
        """Why no mixture helps; None if one does."""
        losses = self.target.allowed(self.count, self.survived)
        if losses < 0:
            return f"{self.count} images are too few to promise {self.target}" if self.target.share > 0 else (
                "that nothing is lost cannot be promised on any number of images")
        if losses >= self.survived:
            return (f"the target allows losing all {self.survived} of {self.count} images that the robust model "
                    "survives, which the accurate model alone does")
        if calibrated is None:
            counts = self.search.rejected(self.target).items()
            return f"every candidate was rejected ({', '.join(f'{n} × {reason}' for reason, n in counts if n)})"
        clean = calibrated[0].clean
        return None if clean > self.robust_clean else (
            f"the best mixture classifies {100 * clean:.1f} % of the clean images that did not select it correctly, "
            f"the robust model {100 * self.robust_clean:.1f} %")


@dataclass(frozen=True, eq=False)
class CalibratedMixture:
    """A mixture with its promise, and the calibration that it came from."""

    mixture: MixedClassifier
    summary: FitSummary
    calibration: Calibration


def calibrated_mixture(calibration: Calibration, attack: MarginAttack, notes: list[str]) -> CalibratedMixture:
    """The mixture of the attacked models for the target, or the robust one alone (α = 1) with the reason as promise."""
    point = calibration.point(calibration.target)
    failure = calibration.failure(point)
    if failure is None and point is not None:
        best, q = point
        clean, alpha = best.clean, best.alpha
        promise = (f"loses at most {calibration.target} in expectation, {ADVERSARIES[attack.settings.against]}, by "
                   f"conformal risk control on {calibration.count} images that did not select the map")
        mixture = MixedClassifier(
            attack.accurate, attack.robust, alpha, logit_map=best.logit_map(), hard=True,
            frontier=calibration.frontier(best), surrogate_alpha=calibration.surrogate_alpha())
    else:
        clean, q, alpha = calibration.robust_clean, 0.0, 1.0
        promise = f"no mixture helps: {failure}; this is the robust model"
        mixture = MixedClassifier(attack.accurate, attack.robust, alpha, hard=True, frontier=calibration.frontier())
    mixture.provenance = Provenance.of(attack.data, promise)
    summary = FitSummary(
        helped=failure is None, promise=promise, clean=clean, robust_clean=calibration.robust_clean,
        robust_attacked=calibration.survived / calibration.count, q=q, alpha=alpha,
        rejected=calibration.search.rejected(calibration.target), notes=tuple(notes))
    return CalibratedMixture(mixture.eval(), summary, calibration)


def fit_mixture(attack: MarginAttack, target: Target, folder: Path | None = None,
                like: LogitMap | None = None) -> CalibratedMixture:
    """Fit the most accurate mixture that loses at most `target`.

    The points where the margin of the robust model is smallest are found once; candidates are then tried on cached
    logits. The map is selected on one half of the images and the threshold on the other, with a finite-sample
    correction, so that the promise holds in expectation for a further image and the attack used here. If the mixture
    is not more accurate than the robust model on that other half, the result is the robust model (α = 1).

    With a folder, logits are kept after the first attack, and an interrupted fit resumes from there; the map `like` is
    used instead of a searched one.
    """
    notes: list[str] = []
    attack.check_inputs()
    if not attack.settings.gradient_free and not attack.has_gradients():
        notes.append("the robust model has no gradients: its margins were attacked by random search (Square)")
        attack = replace(attack, settings=replace(attack.settings, gradient_free=True))
    logits = None if folder is None else load_logits(folder, attack.data)
    if logits is None:
        logits = _first_attack(attack)
        if folder is not None:
            save_logits(folder, logits)
    search, logits = _search(attack, logits.checked(), target, notes, searching=like is None)
    return calibrated_mixture(Calibration(search, logits, target, like), attack, notes)


def _first_attack(attack: MarginAttack) -> CachedLogits:
    clean = attack.clean_logits()
    clean.with_points(clean.clean.unsqueeze(0)).checked()  # errors that need no attack are raised before it
    h, g = attack.run(LogitMap(1.0, 1.0, 0.0, "linear"))
    logits = clean.with_points(h, g if attack.settings.against == "pair" else None).checked()
    if attack.settings.rule == "nuts":
        return logits
    # A confidence switch depends on the top probability only: it needs the points where that is lowest, too.
    return _attack_survivors(attack, logits, _confidence(logits), both=False)


def _confidence(logits: CachedLogits) -> LogitMap:
    """The plain confidence switch: the probability that h gives its first class."""
    unit = float(logits.clean.std(dim=1).mean())
    return LogitMap(unit, 1.0, 0.0, "linear", rivals=0.0, unit=unit)


def _search(attack: MarginAttack, logits: CachedLogits, target: Target, notes: list[str], *,
            searching: bool) -> tuple[MapSearch, CachedLogits]:
    """Search, attack the selected map, and search again with the new points added [Bai2024nuts, D.9]."""
    settings, both = attack.settings, attack.settings.against == "pair"
    if both and settings.rule != "switch":
        logits = _attack_survivors(attack, logits, LogitMap(1.0, 1.0, 0.0, "linear"), both=True)
    if both and settings.rule != "nuts":
        logits = _attack_survivors(attack, logits, _confidence(logits), both=True)
    for number in range(settings.rounds + 1):
        half = logits.halves(settings.seed)[0]
        search = MapSearch(half, families(settings.rule, half, settings.clamp), settings.objective, settings.seed)
        selected = search.run(target)
        if not searching or selected is None:
            break
        if number < settings.rounds:
            logit_map = selected.family.map(selected.candidate)
            notes.append(f"round {number + 1}: {logit_map.extra_repr()} reached {100 * selected.score:.1f} % on the "
                         "search half; the mapped model was attacked again")
            logits = _attack_survivors(attack, logits, logit_map, both=both)
    notes += search.notes
    return search, logits


def _attack_survivors(attack: MarginAttack, logits: CachedLogits, logit_map: LogitMap, *, both: bool) -> CachedLogits:
    """Attack the images that h still survives and add the points; the other images repeat a point they have."""
    rows = logits.survived.nonzero().squeeze(1)
    h, g = replace(attack, data=attack.data.take(rows)).run(logit_map, both=both)
    points = logits.attacked[:1].expand(len(h), -1, -1).clone()
    points[:, rows] = h
    classes = torch.full((len(h), len(logits)), ANY_CLASS)
    if attack.settings.against == "pair":
        classes[:, rows] = g
    return logits.with_points(points, classes).checked()
