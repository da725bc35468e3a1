"""The fit of a cascade of views: a confidence switch over all views, and one over the first view
alone.

The map, its scale for each stage and the threshold q_1 of the first view are selected on one half
of the images, and the threshold q of all views is set on the other. For a given first stage, an
image is lost from some q on: where the first view is sure of a wrong class from any q on, where it
is unsure from the margin of all views on. So the loss does not decrease in q, as the bounds of
`core/promises.py` require, and a cascade that loses too many images at every q is given up for the
robust model alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import Attack, margin_suite
from equipoise.core.device import single_thread
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.conformal import Target, ascending, threshold, threshold_of_sorted
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.pipeline import (
    CalibratedMixture,
    Calibration,
    ReusedMap,
    attacked_logits,
    calibrated_mixture,
    search_map,
)
from equipoise.fitting.search import LIMITS, MIN_Q, MapSearch, SelectedMap, is_fragile
from equipoise.mixing import CascadedClassifier, LogitMap
from equipoise.mixing.cascade import BothStages, CascadeMargins, FirstView
from equipoise.models.layers.tta import TTAClassifier

CANDIDATES = 60  # thresholds of the first view that are tried
FIRST_SHARE = 0.25  # of the allowed losses, at most, by a sure first view: the other half of the images may have more
SCALES = (1.0, 0.5, 2.0, 0.25, 4.0)  # of each stage, in units of that of the switch with all views


@dataclass(frozen=True, eq=False)
class Margins:
    """First minus second probability of one stage, negative where its class is wrong.

    They are for N images, R of which the robust model with all views survives at its P points.
    """

    clean: Tensor  # (N,)
    attacked: Tensor  # (P, R)

    @classmethod
    def of(
        cls, clean: Tensor, attacked: Tensor, logits: CachedLogits, logit_map: LogitMap
    ) -> Margins:
        """From the logits (N, K) and (P, N, K) of one stage on these images."""
        rows = logits.survived.nonzero().squeeze(1)
        points = attacked[:, rows]
        own = logits.labels[rows].repeat(len(points))
        return cls(
            _signed(clean, logits.labels, logit_map),
            _signed(points.flatten(0, 1), own, logit_map).view(points.shape[:2]),
        )


@dataclass(frozen=True, eq=False)
class StageMargins:
    """The margins of both stages, and where the accurate model is correct."""

    first: Margins
    all_views: Margins
    accurate_correct: Tensor  # (N,) bool

    @classmethod
    def of(cls, logits: CachedLogits, selected: SelectedMap) -> StageMargins:
        """From cached logits and the maps of a cascade."""
        logit_map, first_map = _maps(selected)
        return cls(
            _first_margins(logits, first_map),
            _all_margins(logits, logit_map),
            logits.accurate == logits.labels,
        )

    def worst(self, first_q: Tensor) -> Tensor:
        """(Q, R) the q from which on an image is lost, for thresholds (Q,) of the first view.

        At a point where the first view is sure it is lost from −1 on or never; an image at the
        least over its points.
        """
        sure = self.first.attacked.abs() > first_q.view(-1, 1, 1)
        decided = torch.where(self.first.attacked > 0, torch.inf, -1.0)
        return torch.where(sure, decided, self.all_views.attacked).amin(dim=1)

    def clean(self, first_q: Tensor, q: Tensor) -> Tensor:
        """(Q,) clean accuracy of cascades with both thresholds (Q,)."""
        by_accurate = self.all_views.clean.abs() <= q.unsqueeze(1)
        without_first = torch.where(by_accurate, self.accurate_correct, self.all_views.clean > 0)
        sure = self.first.clean.abs() > first_q.unsqueeze(1)
        # Rounded as the accuracy of the robust model is, so that an equal one is not larger.
        return torch.where(sure, self.first.clean > 0, without_first).float().mean(dim=1).double()

    def passes(self, first_q: Tensor, views: int) -> Tensor:
        """(Q,) mean number of views of a clean image."""
        return 1 + (views - 1) * (self.first.clean.abs() <= first_q.unsqueeze(1)).double().mean(
            dim=1
        )


class CascadeCalibration(Calibration):
    """Thresholds of all views for a cascade whose first stage is given, on the half that did not
    select it.

    Every target has the same first stage, that of the cascade that was attacked last.
    """

    def __init__(
        self, search: MapSearch, logits: CachedLogits, target: Target, selected: SelectedMap | None
    ) -> None:
        super().__init__(search, logits, target)
        self.selected = selected

    def select(self, target: Target) -> SelectedMap | None:
        """The cascade that was selected before the last attack."""
        return self.selected

    def threshold(self, selected: SelectedMap, losses: int) -> tuple[float, float]:
        """The threshold q at which a cascade loses this many images, and its clean accuracy; q < 0
        if there is none."""
        margins, first_q = (
            StageMargins.of(self.logits, selected),
            torch.tensor([selected.first_q or 0.0]),
        )
        q = threshold(margins.worst(first_q), losses)
        return float(q), float(margins.clean(first_q, q))

    def no_threshold(self, losses: int) -> str:
        """Why no threshold keeps the target."""
        if self.selected is None:
            return super().no_threshold(losses)
        worst = StageMargins.of(self.logits, self.selected).worst(
            torch.tensor([self.selected.first_q or 0.0])
        )
        q = self.threshold(self.selected, losses)[0]
        return (
            f"of {self.count} images, {losses} of which may be lost, a sure first view loses "
            f"{int((worst < 0).sum())}, and the threshold of all views would be q = {q:.3g}"
        )

    def mean_passes(self, views: int) -> tuple[float, float]:
        """Mean number of views of a clean image, and of an attacked one at the most expensive of
        its points."""
        assert (
            self.selected is not None
            and self.logits.first is not None
            and self.logits.first_attacked is not None
        )
        first_map, first_q = _maps(self.selected)[1], self.selected.first_q or 0.0
        points, labels = self.logits.first_attacked, self.logits.labels
        unsure = _signed(self.logits.first, labels, first_map).abs() <= first_q
        at_points = (
            _signed(points.flatten(0, 1), labels.repeat(len(points)), first_map).abs() <= first_q
        )
        clean, attacked = (
            1 + (views - 1) * float(where.double().mean())
            for where in (unsure, at_points.view(points.shape[:2]).any(dim=0))
        )
        return clean, attacked


@single_thread()
def select_cascade(
    search: MapSearch, logits: CachedLogits, target: Target, views: int, budget: float
) -> SelectedMap | None:
    """The switch of the search with the first stage and the scales that are best on the half that
    selected it.

    That is the highest clean accuracy that keeps the losses, and the budget of passes per clean
    image. A sure first view may cause a share :data:`FIRST_SHARE` of the losses, which no threshold
    of all views undoes. Of equal cascades that with the fewest passes. Where none keeps the budget,
    the cheapest that keeps the losses; with q_1 = 1 the first view is never sure. None if the
    search has no switch.
    """
    switch, half = search.select(target), logits.halves(search.seed)[0]
    if switch is None:
        return None
    s, p, c = switch.candidate.tolist()
    scales = [min(max(s * factor, LIMITS[0][0]), LIMITS[0][1]) for factor in SCALES]
    candidates = [
        replace(switch, candidate=torch.tensor([scale, p, c], dtype=torch.float64))
        for scale in scales
    ]
    maps = [_maps(candidate)[0] for candidate in candidates]
    first, all_views = ([of(half, own) for own in maps] for of in (_first_margins, _all_margins))
    accurate_correct, losses = (
        half.accurate == half.labels,
        target.allowed(len(half), int(half.survived.sum())),
    )
    best = replace(switch, first_q=1.0, first_scale=s, score=-torch.inf)
    for candidate, all_margins in zip(candidates, all_views, strict=True):
        for first_scale, first_margins in zip(scales, first, strict=True):
            margins = StageMargins(first_margins, all_margins, accurate_correct)
            first_q, score = select_first_q(margins, losses, views, budget)
            if score > best.score:
                best = replace(candidate, first_q=first_q, first_scale=first_scale, score=score)
    return best


def select_first_q(
    margins: StageMargins, losses: int, views: int, budget: float
) -> tuple[float, float]:
    """The best threshold of the first view, and its score: the higher, the better is the cascade.

    The score is the clean accuracy, where the budget is not kept the negative number of passes, and
    −∞ where too much is lost, or a threshold depends on rounding errors.
    """
    ordered = margins.first.clean.abs().sort().values
    places = torch.linspace(0, len(ordered) - 1, CANDIDATES).long().unique()
    following = (places + 1).clamp_max(len(ordered) - 1)
    # Half way between two margins, so that rounding does not change which images are sure.
    candidates = (ordered[places] + ordered[following]) / 2
    candidates = torch.cat([candidates[candidates <= 1 - MIN_Q], ordered.new_ones(1)])
    worst = ascending(margins.worst(candidates))
    q = threshold_of_sorted(worst, losses)
    clean, passes = margins.clean(candidates, q), margins.passes(candidates, views)
    keeps_losses = ~is_fragile(worst, q) & ((worst < 0).sum(dim=1) <= FIRST_SHARE * losses)
    score = torch.where(passes <= budget, clean - 1e-6 * passes, -passes)
    score = torch.where(keeps_losses, score, -torch.inf)
    best = int(score.argmax())
    return (
        (float(candidates[best]), float(score[best]))
        if bool(keeps_losses.any())
        else (1.0, -torch.inf)
    )


def fit_cascade(
    attack: MarginAttack, target: Target, folder: Path | None = None, like: ReusedMap | None = None
) -> CalibratedMixture:
    """Fit the most accurate cascade of views that loses at most `target` and keeps the budget of
    passes.

    The robust model with all views is attacked and a confidence switch is searched as by
    :func:`~equipoise.fitting.pipeline.fit_mixture`. Then the first view is attacked alone, for
    points where it is sure of a wrong class, and in every round both stages of the selected cascade
    together. The last such attack is on the cascade that is calibrated: its maps and q_1 do not
    change after it. What is lost is counted against the robust model with all views.
    """
    robust, settings, notes = attack.robust, attack.settings, list[str]()
    assert isinstance(robust, TTAClassifier) and like is None
    views, budget = robust.count, settings.pass_budget
    attack, logits = attacked_logits(attack, folder, notes)
    search, logits = search_map(attack, logits, target, notes)
    suite = margin_suite(settings.steps, settings.targets)
    # Wrong is not enough: where the first view is broken already, it can still become surer.
    logits = _attack_survivors(attack, logits, FirstView(robust), suite, skip_broken=False)
    selected: SelectedMap | None = None
    for _ in range(settings.rounds + 1):
        previous, selected = selected, select_cascade(search, logits, target, views, budget)
        if selected is None or (previous is not None and _stages(previous) == _stages(selected)):
            break
        cascade = CascadedClassifier(
            attack.accurate,
            robust,
            0.5,
            first_q=selected.first_q or 0.0,
            first_scale=selected.first_scale,
            logit_map=_maps(selected)[0],
        ).to(attack.device)
        both = replace(suite, surrogate=BothStages(cascade), follow="surrogate")
        logits = _attack_survivors(attack, logits, CascadeMargins(cascade), both, skip_broken=True)
    calibration = CascadeCalibration(search, logits, target, selected)
    fitted = calibrated_mixture(calibration, attack, notes)
    return replace(
        fitted, summary=replace(fitted.summary, **_passes(fitted, calibration, views, budget))
    )


def _passes(
    fitted: CalibratedMixture, calibration: CascadeCalibration, views: int, budget: float
) -> dict[str, Any]:
    """What a summary says about the passes of a fitted cascade, or of the robust model in its
    place."""
    if isinstance(fitted.mixture, CascadedClassifier):
        passes, attacked = calibration.mean_passes(views)
        measured, where = (
            {"passes": passes, "attacked_passes": attacked},
            " that did not select the cascade",
        )
    else:
        passes, measured, where = float(views), {}, ""
    note = f"{passes:.3g} passes of the robust model per clean image{where} are more than the {budget:g} of --passes"
    return {**measured, "notes": (*fitted.summary.notes, *([note] if passes > budget else []))}


def _attack_survivors(
    attack: MarginAttack,
    logits: CachedLogits,
    model: nn.Module,
    suite: Attack,
    *,
    skip_broken: bool,
) -> CachedLogits:
    """Attack a model by its margin on the images that h survives, and add the points."""
    rows = logits.survived.nonzero().squeeze(1)
    points = replace(attack, data=attack.data.take(rows)).run_on(
        model.eval(), suite, skip_broken=skip_broken
    )
    return logits.with_points_of(rows, points, use_accurate=False).checked()


def _maps(selected: SelectedMap) -> tuple[LogitMap, LogitMap]:
    """The maps of all views and of the first view."""
    logit_map = selected.family.map(selected.candidate)
    return logit_map, logit_map if selected.first_scale is None else logit_map.with_scale(
        selected.first_scale
    )


def _stages(selected: SelectedMap) -> tuple[object, ...]:
    """What an attack on the stages of a cascade depends on."""
    return (
        selected.family,
        tuple(selected.candidate.tolist()),
        selected.first_q,
        selected.first_scale,
    )


def _first_margins(logits: CachedLogits, logit_map: LogitMap) -> Margins:
    assert logits.first is not None and logits.first_attacked is not None
    return Margins.of(logits.first, logits.first_attacked, logits, logit_map)


def _all_margins(logits: CachedLogits, logit_map: LogitMap) -> Margins:
    return Margins.of(logits.clean, logits.attacked, logits, logit_map)


def _signed(z: Tensor, labels: Tensor, logit_map: LogitMap) -> Tensor:
    """(B,) first minus second probability of mapped logits (B, K), negative where the first is not
    the label."""
    p = torch.softmax(logit_map(z), dim=1)
    first, second = p.topk(2, dim=1).values.unbind(dim=1)
    return torch.where(p.argmax(dim=1) == labels, first - second, second - first)
