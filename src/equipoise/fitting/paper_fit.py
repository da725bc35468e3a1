"""`--rule paper`: MixedNUTS as published, from models to a mixture, with notes on what the other
rules correct."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from equipoise.core import checks, format
from equipoise.core.arrays import Array
from equipoise.core.losses import signed_margin
from equipoise.core.promises import allowed_losses
from equipoise.core.results import FitSummary
from equipoise.fitting import paper
from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.conformal import Target, threshold
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.paper import PUBLISHED, GridSearch
from equipoise.fitting.pipeline import ReusedMap, attacked_logits
from equipoise.fitting.search import MIN_Q
from equipoise.mixing import LogitMap, MixedClassifier, Provenance
from equipoise.mixing.provenance import RULES


@dataclass(frozen=True, eq=False)
class PaperFit:
    """MixedNUTS, the logits that it was fitted on, and its grid."""

    mixture: MixedClassifier
    summary: FitSummary
    logits: CachedLogits
    search: GridSearch
    objective: str


def fit_paper(
    attack: MarginAttack, target: Target, folder: Path | None = None, like: ReusedMap | None = None
) -> PaperFit:
    """Algorithm 1 on all fitting images [Bai2024nuts].

    No image is held out, the grid is neither widened nor refined, no candidate is rejected, the
    percentile is interpolated and without a finite-sample correction, and margins are those of the
    top class, whichever it is. With `like` only alpha is fitted [Bai2024nuts, D.5]. With `rounds`
    above 0 the mapped model is attacked once and the objective recomputed there [Bai2024nuts, D.9];
    the mixture is the same.
    """
    settings, notes = attack.settings, list[str]()
    attack, logits = attacked_logits(attack, folder, notes)
    beta = _share_to_keep(target, logits, notes)
    errors = _errors(attack, logits)
    search, clamp, grid = _search(attack, logits, errors, beta, like, notes)
    logit_map = LogitMap(*search.candidate, clamp)
    promise = (
        f"was fitted to keep {format.percent(beta)} of the robust model's attacked accuracy on its own "
        f"{len(logits)} images, and promises nothing beyond them"
    )
    surrogate_q = paper.percentile(paper.top_margins(_kept(logits)), grid.surrogate_beta)
    mixture = MixedClassifier(
        attack.accurate,
        attack.robust,
        search.alpha,
        logit_map=logit_map,
        surrogate_alpha=1 / (1 + surrogate_q),
        provenance=Provenance.of(
            attack.data, promise, "paper", like=None if like is None else like.provenance
        ),
        **settings.accurate_side,
    ).eval()
    notes += _differences(logits, logit_map, search, beta)
    objective = float(search.objective[search.best])
    recomputed = (
        _recomputed(attack, logits, errors, logit_map, beta) if settings.rounds > 0 else None
    )
    if recomputed is not None:
        notes.append(
            f"objective (share of the clean errors that the robust model decides, lower is better): "
            f"{format.percent(objective)}, recomputed under an attack on the mapped model "
            f"{format.percent(recomputed)}"
        )
    correct = clean_predictions(mixture, logits) == logits.labels
    clean_accuracy, robust_clean = (
        float(correct.float().mean()),
        float(logits.correct.float().mean()),
    )
    summary = FitSummary(
        helped=clean_accuracy > robust_clean,
        promise=promise,
        clean=clean_accuracy,
        robust_clean=robust_clean,
        robust_attacked=int(logits.survived.sum()) / len(logits),
        q=float(search.q[search.best]),
        alpha=mixture.alpha,
        notes=tuple(notes),
        rule="paper",
        method=RULES["paper"],
        objective=objective,
        recomputed_objective=recomputed,
        images=len(logits),
    )
    return PaperFit(mixture, summary, logits, search, settings.search_objective)


def _share_to_keep(target: Target, logits: CachedLogits, notes: list[str]) -> float:
    """β: the share of the images that survive the attack which the mixture keeps; a target in
    points is converted."""
    survivors = int(logits.survived.sum())
    beta = max(1 - target.share * (1 if target.of_robust else len(logits) / survivors), 0.0)
    if not target.of_robust:
        notes.append(
            f"{target} are β = {beta:.4g}: {survivors} of {len(logits)} images survive the attack"
        )
    return beta


def _errors(attack: MarginAttack, logits: CachedLogits) -> torch.Tensor:
    """(N,) the clean errors of the robust model that the objective counts; there must be one."""
    settings, errors = attack.settings, ~logits.correct
    if settings.search_objective == "conditional":
        errors &= logits.accurate == logits.labels
    checks.require(
        bool(errors.any()),
        "data",
        "hold a clean image that the robust model misclassifies"
        + (" and the accurate one does not" if settings.search_objective == "conditional" else ""),
        "none",
    )
    checks.require(
        settings.accurate_side["hard"] or logits.accurate_logits is not None,
        "accurate",
        "output logits if its temperature is not 0",
        "classes",
    )
    return errors


def _kept(logits: CachedLogits) -> torch.Tensor:
    """(N', K) logits of the images that survive, at the points of smallest margin, which are the
    first ones."""
    return logits.attacked[0, logits.survived]


def _search(
    attack: MarginAttack,
    logits: CachedLogits,
    errors: torch.Tensor,
    beta: float,
    like: ReusedMap | None,
    notes: list[str],
) -> tuple[GridSearch, str, paper.PublishedSettings]:
    """The search for the map, its clamp, and the published settings of the number of classes."""
    name = paper.published_for(attack.data.num_classes)
    grid = PUBLISHED[name]
    clamp, axes = (attack.settings.search_clamp, grid.axes()) if like is None else _single(like)
    if clamp == "linear" and like is None:
        axes = (*axes[:2], np.zeros(1))
    search = paper.algorithm_1(
        _kept(logits), logits.clean[errors], beta, axes, clamp, grid.saturation
    )
    searched = (
        f"with the grid published for {name}"
        if like is None
        else "for the reused map alone, without a search"
    )
    notes.append(
        f"Algorithm 1 on all {len(logits)} images {searched}, β = {beta:.4g}; margins by "
        f"{_attack_in_words(attack)} (the paper: 100 steps of APGD on cross-entropy and towards 9 targets)"
    )
    if (optima := len(search.optima)) > 1:
        notes.append(
            f"{optima} candidates have the lowest objective; of these, one whose threshold is not saturated, "
            "if there is one, with the largest 1 − alpha"
        )
    return search, clamp, grid


def _attack_in_words(attack: MarginAttack) -> str:
    settings = attack.settings
    if settings.gradient_free:
        return f"{50 * settings.steps} queries of Square"
    steps, targets = (
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in ((settings.steps, "step"), (settings.targets, "target"))
    )
    return f"{steps} of APGD on cross-entropy, on the margin and towards {targets}"


def _single(like: ReusedMap) -> tuple[str, paper.Axes]:
    """The clamp and the numbers of a map, as a grid of one candidate."""
    own, record = like.logit_map.settings, like.provenance
    checks.require(
        own.unit is None and own.rivals == 1 and own.clamp != "gelu-monotone",
        "like",
        "name a mixture with a map of the paper's form with rule paper",
        str(like.logit_map),
    )
    checks.require(
        record is None or record.rule == "paper",
        "like",
        "name published numbers or a mixture that was fitted by rule paper, with rule paper",
        None if record is None else record.rule,
    )
    return own.clamp, (np.array([own.scale]), np.array([own.power]), np.array([own.shift]))


def clean_predictions(mixture: MixedClassifier, logits: CachedLogits) -> torch.Tensor:
    """(N,) classes of the mixture on the clean images, from cached logits; of tied classes that of
    the accurate model.

    A soft accurate side needs its cached logits.
    """
    h = mixture.robust_side(*logits.clean_outputs)
    if not mixture.hard and logits.accurate_logits is not None:
        return mixture.mix_sides(logits.accurate_logits, h).argmax(dim=1)
    p = h.exp()
    gap = p.amax(dim=1) - p.gather(1, logits.accurate.unsqueeze(1)).squeeze(1)
    return torch.where(gap <= mixture.q, logits.accurate, p.argmax(dim=1))


def _recomputed(
    attack: MarginAttack,
    logits: CachedLogits,
    errors: torch.Tensor,
    logit_map: LogitMap,
    beta: float,
) -> float | None:
    """The objective with the threshold at new points, of smallest margin of the mapped model; None
    if it has none."""
    rows = logits.correct.nonzero().squeeze(1)
    points = replace(attack, data=attack.data.take(rows)).run(logit_map)[0][0]
    mapped = logit_map(points.to(logits.clean).double())
    kept = mapped[mapped.argmax(dim=1) == logits.labels[rows]]
    if not len(kept):
        return None
    q = paper.percentile(paper.top_margins(kept), beta)
    return paper.errors_kept(paper.top_margins(logit_map(logits.clean[errors].double())), q)


def _differences(
    logits: CachedLogits, logit_map: LogitMap, search: GridSearch, beta: float
) -> list[str]:
    """Where the corrections that this rule leaves out would have changed the result."""
    q, notes = float(search.q[search.best]), []
    attacked, labels = (
        logit_map(logits.attacked[0, logits.survived].double()),
        logits.labels[logits.survived],
    )
    clean = logit_map(logits.clean.double())
    changed = int((clean.argmax(dim=1) != logits.clean.argmax(dim=1)).sum())
    lost = int((attacked.argmax(dim=1) != labels).sum())
    if changed or lost:
        accuracy = float((clean.argmax(dim=1) == logits.labels).float().mean())
        notes.append(
            f"the map changes the robust model's class on {changed} clean and {lost} attacked images (of "
            "those that it classifies correctly); its clean accuracy is "
            f"{format.percent(float(logits.correct.float().mean()))} without the map and "
            f"{format.percent(accuracy)} with it. Other rules reject such maps"
        )
    margins = signed_margin(torch.softmax(attacked, dim=1), labels)
    survivors = len(labels)
    left = int((margins > q).sum())
    if left < beta * survivors - 1e-9:
        notes.append(
            f"whatever the accurate model predicts, {left} of {survivors} attacked images keep their class, "
            f"{format.percent(left / survivors)} and not {format.percent(beta)}: the percentile is "
            "interpolated, and counts the margin of any class"
        )
    losses = allowed_losses(1 - beta, survivors)
    if losses < 0:
        notes.append(
            f"{survivors} attacked images that survive are too few to promise {format.percent(beta)} for "
            "further images; Algorithm 1 has no such check"
        )
    elif (safe := max(float(threshold(margins, losses)), 0.0)) < q:
        notes.append(
            f"the conformal threshold of the other rules would be {safe:.4g} with this map (alpha "
            f"{1 / (1 + safe):.6g}) instead of {q:.4g}"
        )
    if edges := search.edges():
        notes.append(
            f"the optimum lies on the edge of the grid ({', '.join(edges)}), which this rule does not widen"
        )
    if not MIN_Q <= q <= 1 - MIN_Q:
        notes.append(
            f"the threshold {q:.3g} is so near to {0 if q < 0.5 else 1} that rounding errors of fp32 matter"
        )
    return notes


def landscape(search: GridSearch) -> Array:
    """(C, P, S) the share of clean errors left to the accurate model, at every candidate; higher is
    better."""
    cube: Array = 1 - search.objective.transpose(1, 2, 0)
    return cube
