"""Rows and arrays of a fit, for its run folder and report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arrays import Array, FitArrays
from equipoise.core.device import single_thread
from equipoise.core.losses import signed_margin
from equipoise.core.rows import CALIBRATION, SEARCH, AttackRow
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.conformal import lose_at_most, threshold
from equipoise.fitting.paper_fit import PaperFit, clean_predictions, landscape
from equipoise.fitting.pipeline import CalibratedMixture
from equipoise.mixing import MixedClassifier, gate_of, mix

ATTACK = "minimum-margin"
CURVE_TARGETS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # points of robust accuracy


@single_thread()
def rows(fit: CalibratedMixture | PaperFit) -> list[AttackRow]:
    """Both models and the mixture on the fitting images, clean and at the points of smallest
    margin.

    The accurate model is not attacked by a fit, so it has clean rows only.
    At attacked points the mixture is correct if it keeps the true class whatever the accurate model
    predicts there.
    """
    logits = fit.logits if isinstance(fit, PaperFit) else fit.calibration.all_logits
    halves: dict[int, str] = (
        {}
        if isinstance(fit, PaperFit)
        else {
            **dict.fromkeys(logits.index.tolist(), SEARCH),
            **dict.fromkeys(fit.calibration.logits.index.tolist(), CALIBRATION),
        }
    )
    mixture, plain = fit.mixture, logits.clean.softmax(dim=1)
    mapped = mixture.robust_side(*logits.clean_outputs).exp()
    predicted = clean_predictions(mixture, logits)
    worst = _attacked_margin(logits, mixture.robust_side)
    gap = (
        torch.full((len(logits),), torch.nan)
        if logits.accurate_logits is None
        else signed_margin(logits.accurate_logits.softmax(dim=1), logits.labels)
    )
    measured = [
        ("accurate", "clean", logits.accurate == logits.labels, gap),
        ("robust", "clean", logits.correct, signed_margin(plain, logits.labels)),
        ("robust", ATTACK, logits.survived, _attacked_margin(logits, _log_softmax)),
        ("mixed", "clean", predicted == logits.labels, signed_margin(mapped, logits.labels)),
        ("mixed", ATTACK, logits.survived & (worst > mixture.q), worst),
    ]
    return [
        AttackRow(
            index=index,
            model=model,
            attack=attack,
            label=label,
            correct=is_correct,
            margin=None if math.isnan(value) else round(value, 6),
            half=halves.get(index),
        )
        for model, attack, correct, margin in measured
        for index, label, is_correct, value in zip(
            logits.index.tolist(),
            logits.labels.tolist(),
            correct.tolist(),
            margin.tolist(),
            strict=True,
        )
    ]


@single_thread()
def arrays(fit: CalibratedMixture | PaperFit) -> FitArrays:
    """What the report draws: margins before and after the map, the landscape of the search, and the
    trade-off."""
    if isinstance(fit, PaperFit):
        scores, axes = landscape(fit.search), fit.search.axes
        return FitArrays(
            **_margins(fit.mixture, fit.logits),
            landscape=scores,
            usable=np.ones_like(scores, dtype=bool),
            axis_s=axes[0],
            axis_p=axes[1],
            axis_c=axes[2],
            landscape_family=fit.summary.method,
            objective=fit.objective,
            selected=np.array(fit.search.candidate),
        )
    logits, mixture, search = fit.calibration.all_logits, fit.mixture, fit.calibration.search
    scored = {
        family: search.score(fit.calibration.target, table)
        for family, table in search.tables.items()
    }
    best_scores = {family: float(table.score.amax()) for family, table in scored.items()}
    best = max(
        (family for family in scored if not family.scale_only),
        key=lambda family: best_scores[family],
    )
    cube = (search.space.steps,) * 3
    # The grid comes before all later candidates: s fastest, then p, then c
    grid = slice(search.space.steps**3)
    axis_s, axis_p, axis_c = (axis.numpy() for axis in search.space.axes())
    map_curve, plain_curve = trade_off(fit)
    return FitArrays(
        **_margins(mixture, logits),
        landscape=scored[best].unfiltered_score[grid].view(cube).numpy(),
        usable=scored[best].score[grid].isfinite().view(cube).numpy(),
        axis_s=axis_s,
        axis_p=axis_p,
        axis_c=axis_c,
        landscape_family=str(best),
        objective=search.objective,
        families=tuple(map(str, best_scores)),
        family_scores=np.array(list(best_scores.values())),
        selected=None if mixture.logit_map is None else mixture.logit_map.numbers.numpy(),
        map_curve=map_curve,
        plain_curve=plain_curve,
    )


def _margins(mixture: MixedClassifier, logits: CachedLogits) -> dict[str, Any]:
    """The threshold, and the margins of the robust model before and after the map."""
    return {
        "q": mixture.q,
        "clean_before": _top_margin(logits, _log_softmax).numpy(),
        "clean_after": _top_margin(logits, mixture.robust_side).numpy(),
        "clean_correct": logits.correct.numpy(),
        "attacked_before": _attacked_top_margin(logits, _log_softmax).numpy(),
        "attacked_after": _attacked_top_margin(logits, mixture.robust_side).numpy(),
        "attacked_correct": logits.survived.numpy(),
    }


def trade_off(fit: CalibratedMixture) -> tuple[Array | None, Array | None]:
    """Clean and worst-case accuracy (over classes of g) of fitted maps and of plain mixing, on the
    calibration half.

    It did not select the maps, but set the thresholds: attacked accuracies are the allowed ones by
    construction. Each curve is (T, 2), or None if no target has a point on it.
    """
    calibration, logits = fit.calibration, fit.calibration.logits
    count, survived = calibration.count, calibration.survived
    start = [calibration.robust_clean, survived / max(count, 1)]
    map_curve, plain_curve = [start], [start]
    plain_margins = _attacked_margin(logits, _log_softmax)[logits.survived]
    for points in CURVE_TARGETS:
        target = lose_at_most(points, calibration.target.confidence)
        losses = target.allowed(count, survived)
        if not 0 <= losses < survived:
            continue
        point = calibration.point(target)
        if point is not None:
            map_curve.append([point[0].clean, (survived - losses) / count])
        if logits.accurate_logits is not None:
            alpha = 1 / (1 + float(threshold(plain_margins, losses)))
            mixed = mix(
                _log_softmax(logits.accurate_logits), _log_softmax(logits.clean), gate_of(alpha)
            )
            correct = mixed.argmax(dim=1) == logits.labels
            plain_curve.append([float(correct.float().mean()), (survived - losses) / count])
    first, second = (
        np.array(curve) if len(curve) > 1 else None for curve in (map_curve, plain_curve)
    )
    return first, second


def _log_softmax(z: Tensor, *_: Tensor) -> Tensor:
    return F.log_softmax(z, dim=1)


def _top_margin(logits: CachedLogits, log_p: Callable[..., Tensor]) -> Tensor:
    """(N,) difference of the two largest probabilities on clean images."""
    return _first_minus_second(log_p(*logits.clean_outputs).exp())


def _attacked_margin(logits: CachedLogits, log_p: Callable[..., Tensor]) -> Tensor:
    """(N,) the smallest signed margin of the true class over the attacked points."""
    return _attacked(logits, log_p)[1].amin(dim=0)


def _attacked_top_margin(logits: CachedLogits, log_p: Callable[..., Tensor]) -> Tensor:
    """(N,) difference of the two largest probabilities where the signed margin of the true class is
    smallest.

    Of a misclassified point that is not the size of its signed margin: the true class need not be
    second.
    """
    p, margins = _attacked(logits, log_p)
    return _first_minus_second(p[margins.argmin(dim=0), torch.arange(p.shape[1])])


def _attacked(logits: CachedLogits, log_p: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """(P, N, K) probabilities at the attacked points, and (P, N) signed margins of the true
    class."""
    points, n, classes = logits.attacked.shape
    p = log_p(*(outputs.reshape(-1, classes) for outputs in logits.attacked_outputs)).exp()
    return p.view(points, n, classes), signed_margin(p, logits.labels.repeat(points)).view(
        points, n
    )


def _first_minus_second(p: Tensor) -> Tensor:
    top = p.topk(2, dim=1).values
    return top[:, 0] - top[:, 1]
