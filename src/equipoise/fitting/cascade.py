"""The fit of a cascade of views: a confidence switch over all views, and a threshold for the first view alone.

The map and the threshold q_1 of the first view are selected on one half of the images, and the threshold q of all views
is set on the other. For given q_1, an image is lost from some q on: where the first view is sure of a wrong class from
any q on, where it is unsure from the margin of all views on. So the loss does not decrease in q, as the bounds of
`core/promises.py` require, and a cascade that loses too many images at every q is given up for the robust model alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.attacks import Attack, margin_suite
from equipoise.core.losses import signed_margin
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.conformal import Target, threshold
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.pipeline import (
    CalibratedMixture,
    Calibration,
    ReusedMap,
    attacked_logits,
    calibrated_mixture,
    search_map,
)
from equipoise.fitting.search import MIN_Q, MapSearch, SelectedMap
from equipoise.fitting.settings import DEFAULT_PASSES
from equipoise.mixing import CascadedClassifier, FrontierMixture, LogitMap
from equipoise.mixing.cascade import BothStages, CascadeMargins, FirstView
from equipoise.models.preprocessing import TTAClassifier

CANDIDATES = 60  # thresholds of the first view that are tried
FIRST_SHARE = 0.5  # of the allowed losses, at most, by a sure first view: the other half of the images may have more


@dataclass(frozen=True, eq=False)
class StageMargins:
    """Margins of both stages on N images, R of which the robust model with all views survives at its P points."""

    first_margin: Tensor  # (N,) first minus second probability of the first view
    first_correct: Tensor  # (N,) bool
    gap: Tensor  # (N,) the same margin of all views
    correct: Tensor  # (N,) bool: all views
    accurate_correct: Tensor  # (N,) bool: g
    attacked_first: Tensor  # (P, R) margin of the first view
    attacked_right: Tensor  # (P, R) bool: the first view predicts the true class
    attacked_margin: Tensor  # (P, R) signed margin of the true class over all views

    @classmethod
    def of(cls, logits: CachedLogits, logit_map: LogitMap) -> StageMargins:
        """From cached logits and a map."""
        assert logits.first is not None and logits.first_attacked is not None
        rows, labels = logits.survived.nonzero().squeeze(1), logits.labels
        first, mean = (_probabilities(logit_map, z) for z in logits.clean_outputs[::-1])
        attacked_first, attacked_mean = (
            _probabilities(logit_map, z[:, rows].reshape(-1, z.shape[2])) for z in (logits.first_attacked,
                                                                                     logits.attacked))
        points, own = len(logits.attacked), labels[rows].repeat(len(logits.attacked))
        grid = (points, len(rows))
        return cls(_top_margin(first), first.argmax(dim=1) == labels, _top_margin(mean), mean.argmax(dim=1) == labels,
                   logits.accurate == labels, _top_margin(attacked_first).view(grid),
                   (attacked_first.argmax(dim=1) == own).view(grid), signed_margin(attacked_mean, own).view(grid))

    def worst(self, first_q: Tensor) -> Tensor:
        """(Q, R) the q from which on an image is lost, for thresholds (Q,) of the first view.

        At a point where the first view is sure it is lost from −1 on or never; an image at the least over its points.
        """
        sure = self.attacked_first > first_q.view(-1, 1, 1)
        decided = torch.where(self.attacked_right, torch.inf, -1.0)
        return torch.where(sure, decided, self.attacked_margin).amin(dim=1)

    def clean(self, first_q: Tensor, q: Tensor) -> Tensor:
        """(Q,) clean accuracy of cascades with both thresholds (Q,)."""
        without_first = torch.where(self.gap <= q.unsqueeze(1), self.accurate_correct, self.correct)
        sure = self.first_margin > first_q.unsqueeze(1)
        return torch.where(sure, self.first_correct, without_first).double().mean(dim=1)

    def passes(self, first_q: Tensor, views: int) -> Tensor:
        """(Q,) mean number of views of a clean image."""
        return 1 + (views - 1) * (self.first_margin <= first_q.unsqueeze(1)).double().mean(dim=1)


class CascadeCalibration(Calibration):
    """Thresholds for cascades: that of the first view from the search half, that of all views from the other.

    Args:
        search, logits, target: as for :class:`Calibration`.
        views: of the robust model.
        budget: most passes per clean image, on average; the cheapest cascade where none keeps it.
    """

    def __init__(self, search: MapSearch, logits: CachedLogits, target: Target, views: int, budget: float) -> None:
        super().__init__(search, logits, target)
        self.search_logits, self.views, self.budget = logits.halves(search.seed)[0], views, budget

    def select(self, target: Target) -> SelectedMap | None:
        """The map of the search, with the threshold of the first view that is best on the same half."""
        selected = super().select(target)
        if selected is None:
            return None
        margins = StageMargins.of(self.search_logits, selected.family.map(selected.candidate))
        allowed = target.allowed(len(self.search_logits), margins.attacked_margin.shape[1])
        return replace(selected, first_q=select_first_q(margins, allowed, self.views, self.budget))

    def threshold(self, selected: SelectedMap, losses: int) -> tuple[float, float]:
        """The threshold q at which a cascade loses this many images, and its clean accuracy; q < 0 if there is none."""
        margins = StageMargins.of(self.logits, selected.family.map(selected.candidate))
        first_q = torch.tensor([selected.first_q], dtype=torch.float32)
        q = threshold(margins.worst(first_q), losses)
        return float(q), float(margins.clean(first_q, q))

    def failure(self, calibrated: tuple[FrontierMixture, float] | None) -> str | None:
        """Why no cascade helps; None if one does."""
        reason, selected = super().failure(calibrated), self.select(self.target)
        losses = self.target.allowed(self.count, self.survived)
        if reason is None or calibrated is not None or selected is None or not 0 <= losses < self.survived:
            return reason
        margins = StageMargins.of(self.logits, selected.family.map(selected.candidate))
        by_first = int((margins.worst(torch.tensor([selected.first_q])) < 0).sum())
        q = self.threshold(selected, losses)[0]
        return (f"of {self.count} images, {losses} of which may be lost, a sure first view loses {by_first}, and the "
                f"threshold of all views would be q = {q:.3g}")

    def mean_passes(self, first_q: float, logit_map: LogitMap) -> float:
        """Mean number of views of a clean image that did not select the cascade."""
        return float(StageMargins.of(self.logits, logit_map).passes(torch.tensor([first_q]), self.views))


def select_first_q(margins: StageMargins, losses: int, views: int, budget: float) -> float:
    """The threshold of the first view with the highest clean accuracy that keeps the losses and the passes.

    A sure first view may cause a share :data:`FIRST_SHARE` of the losses, which no threshold of all views undoes. Of
    equal ones that with the fewest passes. Where none keeps the passes, the cheapest that keeps the losses; at 1 the
    first view is never sure.
    """
    ordered = margins.first_margin.sort().values
    places = torch.linspace(0, len(ordered) - 1, CANDIDATES).long().unique()
    following = (places + 1).clamp_max(len(ordered) - 1)
    # Half way between two margins, so that rounding does not change which images are sure.
    candidates = torch.cat([(ordered[places] + ordered[following]) / 2, ordered.new_ones(1)])
    worst = margins.worst(candidates)
    q = threshold(worst, losses)
    clean, passes = margins.clean(candidates, q), margins.passes(candidates, views)
    by_first = (worst < 0).sum(dim=1)
    keeps_losses = (q >= MIN_Q) & (q <= 1 - MIN_Q) & (by_first <= FIRST_SHARE * losses)
    affordable = keeps_losses & (passes <= budget)
    if bool(affordable.any()):
        score = torch.where(affordable, clean - 1e-6 * passes, -torch.inf)
    else:
        score = torch.where(keeps_losses, -passes, -torch.inf)
    return float(candidates[score.argmax()]) if bool(keeps_losses.any()) else 1.0


def fit_cascade(attack: MarginAttack, target: Target, folder: Path | None = None,
                like: ReusedMap | None = None) -> CalibratedMixture:
    """Fit the most accurate cascade of views that loses at most `target` and keeps the budget of passes.

    The robust model with all views is attacked and a confidence switch is searched as by
    :func:`~equipoise.fitting.pipeline.fit_mixture`. Then the first view is attacked alone, for points where it is sure
    of a wrong class, and in every round both stages together. What is lost is counted against the robust model with all
    views.
    """
    robust, notes = attack.robust, list[str]()
    assert isinstance(robust, TTAClassifier) and like is None
    attack, logits = attacked_logits(attack, folder, notes)
    search, logits = search_map(attack, logits, target, notes)
    budget = DEFAULT_PASSES if attack.settings.passes is None else attack.settings.passes
    settings, views = attack.settings, robust.count

    def calibrated(logits: CachedLogits) -> CascadeCalibration:
        return CascadeCalibration(search, logits, target, views, budget)

    suite = margin_suite(settings.steps, settings.targets)
    logits = _attack_survivors(attack, logits, FirstView(robust), suite)
    for _ in range(settings.rounds):
        selected = calibrated(logits).select(target)
        if selected is None:
            break
        cascade = CascadedClassifier(attack.accurate, robust, 0.5, first_q=selected.first_q or 0.0,
                                     logit_map=selected.family.map(selected.candidate)).to(attack.device)
        both = replace(suite, surrogate=BothStages(cascade), follow="surrogate")
        logits = _attack_survivors(attack, logits, CascadeMargins(cascade), both)
    calibration = calibrated(logits)
    fitted = calibrated_mixture(calibration, attack, notes)
    mixture = fitted.mixture
    if not isinstance(mixture, CascadedClassifier) or mixture.logit_map is None:
        return fitted
    passes = calibration.mean_passes(mixture.first_q, mixture.logit_map)
    if passes > budget:
        note = (f"{passes:.2f} passes of the robust model per clean image, on images that did not select the cascade, "
                f"are more than the {budget:g} of --passes")
        fitted = replace(fitted, summary=replace(fitted.summary, notes=(*fitted.summary.notes, note)))
    return replace(fitted, summary=replace(fitted.summary, passes=passes))


def _attack_survivors(attack: MarginAttack, logits: CachedLogits, model: nn.Module, suite: Attack) -> CachedLogits:
    """Attack a model by its margin on the images that h survives, and add the points."""
    rows = logits.survived.nonzero().squeeze(1)
    points = replace(attack, data=attack.data.take(rows)).run_on(model.eval(), suite)
    return logits.with_points_of(rows, points, use_accurate=False).checked()


def _probabilities(logit_map: LogitMap, z: Tensor) -> Tensor:
    return torch.softmax(logit_map(z), dim=1)


def _top_margin(p: Tensor) -> Tensor:
    top = p.topk(2, dim=1).values
    return top[:, 0] - top[:, 1]
