"""Aggregate per-image rows into accuracies with confidence intervals, worst cases and paired
differences."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from equipoise.core import stats
from equipoise.core.promises import PromiseCheck, Target
from equipoise.core.radius_curves import RadiusCurve, radius_curve
from equipoise.core.results import BrokenCount, ClassAccuracy, Difference, Result
from equipoise.core.rows import AUDIT, AttackRow, Row
from equipoise.core.threat import Threat

CLEAN, WORST, ROBUST = "clean", "worst", "robust"
# The two base models and their mixture, in the order of every table
MODELS = "accurate", ROBUST, "mixed"
ModelAndAlpha = tuple[str, float | None]
Correct = dict[int, bool]  # image index → classified correctly


def base_models_first(model: str) -> int:
    """A key that sorts the two base models before their mixture, and others after it in the order
    they have."""
    return MODELS.index(model) if model in MODELS else len(MODELS)


def correct_by_attack(rows: Iterable[Row]) -> dict[ModelAndAlpha, dict[str, Correct]]:
    """For every model (and alpha, where rows have one) and attack: which images are classified
    correctly.

    "worst" is the worst case over every attack of the run and its audit, the clean image included,
    on the images that every attack has been run on.
    """
    return {
        group: {
            attack: {index: _is_correct(row, attack) for index, row in own.items()}
            for attack, own in attacks.items()
        }
        for group, attacks in _rows_by_attack(rows).items()
    }


def _is_correct(row: AttackRow, metric: str) -> bool:
    """Whether an image counts in a metric: what only the audit of an attack broke counts as broken
    in the worst case, not under the name of the attack, whose accuracy must not depend on the size
    of the sample."""
    return row.correct or (metric != WORST and row.only_audit_broke)


def _rows_by_attack(rows: Iterable[Row]) -> dict[ModelAndAlpha, dict[str, dict[int, AttackRow]]]:
    table: dict[ModelAndAlpha, dict[str, dict[int, AttackRow]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        if isinstance(row, AttackRow):
            table[row.model, row.alpha][row.attack][row.index] = row
    for attacks in table.values():
        if attacks.keys() - {CLEAN}:
            common, listed = set.intersection(*map(set, attacks.values())), list(attacks.values())
            attacks[WORST] = {
                index: worst_row([own[index] for own in listed]) for index in sorted(common)
            }
    return {group: dict(attacks) for group, attacks in table.items()}


def worst_row(rows: Sequence[AttackRow]) -> AttackRow:
    """The row of an image under the attack that is worst for it: one that broke it, and of those
    the smallest margin.

    For a randomised model the margin decides, whose passes are others than those of the share: the
    smallest of several random shares would on average lie below the share of every attack.
    """
    if _is_randomized(rows):
        return min(
            rows, key=lambda row: 2 * share_correct(row) - 1 if row.margin is None else row.margin
        )
    return min(rows, key=lambda row: (row.correct, 1.0 if row.margin is None else row.margin))


def share_correct(row: AttackRow) -> float:
    """How much an image counts in an accuracy: of a randomised model the share of its passes, else
    all or nothing."""
    return float(row.correct) if row.share_correct is None else row.share_correct


def _is_randomized(rows: Iterable[AttackRow]) -> bool:
    return any(row.share_correct is not None for row in rows)


def accuracies(rows: Iterable[Row], threat: Threat | None) -> list[Result]:
    """One result per model and attack, and for the worst case over all attacks and their audits."""
    results = []
    for (model, alpha), attacks in sorted(
        _rows_by_attack(rows).items(), key=lambda item: _model_order(item[0])
    ):
        for metric, by_image in attacks.items():
            own = list(by_image.values())
            passes = max(row.passes or 1 for row in own) if _is_randomized(own) else None
            estimate = (
                stats.share(_is_correct(row, metric) for row in own)
                if passes is None
                else stats.mean_share([share_correct(row) for row in own], passes)
            )
            results.append(
                Result.of(
                    model,
                    metric,
                    estimate,
                    alpha=alpha,
                    passes=passes,
                    threat=None if metric == CLEAN else threat,
                )
            )
    return results


def as_bytes(rows: Iterable[Row], threat: Threat | None) -> list[Result]:
    """Of the images that each attack broke, without its audit: the share that is still
    misclassified as bytes."""
    results = []
    for (model, attack), broken in _broken(rows).items():
        known = [
            row.broken_as_bytes
            for row in broken
            if row.broken_as_bytes is not None and not row.only_audit_broke
        ]
        if known:
            results.append(
                Result.of(
                    model, attack, stats.clopper_pearson(sum(known), len(known)), threat=threat
                )
            )
    return results


def broken_by(rows: Iterable[Row]) -> list[BrokenCount]:
    """How many images each stage of each attack broke that are classified correctly without it;
    most first.

    What only the audit of an attack broke stands under its own name, such as "fast audit".
    """
    counts = {
        group: Counter((row.broken_by or row.attack).removeprefix(AUDIT) for row in broken)
        for group, broken in _broken(rows).items()
    }
    return [
        BrokenCount(model=model, attack=attack, stage=stage, count=count, n=counted.total())
        for (model, attack), counted in counts.items()
        for stage, count in counted.most_common()
    ]


def by_class(rows: Iterable[Row]) -> list[ClassAccuracy]:
    """Clean accuracy and that in the worst case over all attacks, for every model and class; they
    add up to results."""
    own_rows = [row for row in rows if isinstance(row, AttackRow) and row.alpha is None]
    labels = {row.index: row.label for row in own_rows}
    result = []
    for (model, _), attacks in sorted(
        _rows_by_attack(own_rows).items(), key=lambda item: _model_order(item[0])
    ):
        worst = attacks.get(WORST, attacks.get(CLEAN, {}))
        for label in sorted({labels[index] for index in worst}):
            own = [index for index in worst if labels[index] == label]
            clean = attacks.get(CLEAN, {})
            result.append(
                ClassAccuracy(
                    model=model,
                    label=label,
                    n=len(own),
                    attacked=sum(share_correct(worst[i]) for i in own),
                    clean=sum(share_correct(clean[i]) for i in own if i in clean),
                )
            )
    return result


def radius_curves(rows: Iterable[Row], norm: str) -> list[RadiusCurve]:
    """The curve of every model whose rows have radii; of several attacks on an image the smallest
    radius counts."""
    radii: dict[str, dict[int, float]] = {}
    largest: dict[str, float] = {}
    for row in rows:
        if isinstance(row, AttackRow) and row.max_radius is not None and row.alpha is None:
            own = radii.setdefault(row.model, {})
            own[row.index] = min(
                own.get(row.index, math.inf), math.inf if row.radius is None else row.radius
            )
            largest[row.model] = row.max_radius
    return [
        radius_curve(model, norm, radii[model], largest[model])
        for model in sorted(radii, key=lambda model: _model_order((model, None)))
    ]


def _broken(rows: Iterable[Row]) -> dict[tuple[str, str], list[AttackRow]]:
    """By model and attack, or its audit: the rows of images that it broke, misclassified under it
    and not without."""
    own = [row for row in rows if isinstance(row, AttackRow) and row.alpha is None]
    wrong = {(row.model, row.index) for row in own if row.attack == CLEAN and not row.correct}
    table: dict[tuple[str, str], list[AttackRow]] = defaultdict(list)
    for row in own:
        if (
            row.attack != CLEAN
            and not row.correct
            and row.broken_by != CLEAN
            and (row.model, row.index) not in wrong
        ):
            table[row.model, f"{row.attack} audit" if row.only_audit_broke else row.attack].append(
                row
            )
    return dict(
        sorted(table.items(), key=lambda item: (_model_order((item[0][0], None)), item[0][1]))
    )


def differences(
    rows: Iterable[Row], pairs: Sequence[tuple[str, str]], threat: Threat | None
) -> list[Difference]:
    """Paired differences of clean and worst-case accuracy between two models on the images both
    were run on."""
    table = _rows_by_attack(rows)
    compared = []
    for model, versus in pairs:
        ours, theirs = table.get((model, None), {}), table.get((versus, None), {})
        for metric in ours.keys() & theirs.keys() & {CLEAN, WORST}:
            common = sorted(ours[metric].keys() & theirs[metric].keys())
            estimate = _difference([(ours[metric][i], theirs[metric][i]) for i in common])
            compared.append(
                Difference(
                    **vars(estimate),
                    model=model,
                    versus=versus,
                    metric=metric,
                    threat=None if metric == CLEAN else threat,
                )
            )
    return sorted(compared, key=lambda row: (row.model, row.versus, row.metric or ""))


def promise_checks(
    rows: Sequence[Row], promised: Mapping[tuple[str, str], Target], threat: Threat
) -> list[PromiseCheck]:
    """For pairs of a fitted mixture and its robust base: the attacked accuracy lost on these
    images, and the promise.

    The loss is that of worst-case accuracy, paired. As a share of the robust images it is divided
    by the accuracy of the base, whose own error is left out of the interval.
    """
    checks, table = [], _rows_by_attack(rows)
    for difference in differences(rows, list(promised), threat):
        target = promised[difference.model, difference.versus]
        if difference.metric != WORST:
            continue
        worst = table[difference.versus, None][WORST]
        base = sum(map(share_correct, worst.values())) / len(worst) if target.of_robust else 1.0
        if base > 0:
            loss, low, high = (
                -value / base for value in (difference.value, difference.high, difference.low)
            )
            checks.append(
                PromiseCheck(
                    value=loss,
                    low=low,
                    high=high,
                    n=difference.n,
                    model=difference.model,
                    versus=difference.versus,
                    promised=target,
                    threat=threat,
                )
            )
    return checks


def _difference(pairs: Sequence[tuple[AttackRow, AttackRow]]) -> stats.Estimate:
    if any(map(_is_randomized, pairs)):
        ours, theirs = ([share_correct(row) for row in side] for side in zip(*pairs, strict=True))
        return stats.mean_paired_difference(ours, theirs)
    gained = sum(own.correct and not other.correct for own, other in pairs)
    lost = sum(other.correct and not own.correct for own, other in pairs)
    return stats.paired_difference(gained, lost, len(pairs))


def _model_order(group: ModelAndAlpha) -> tuple[int, str, float]:
    """The two base models first, then their mixture, then the rest by name."""
    model, alpha = group
    return base_models_first(model), model, -1.0 if alpha is None else alpha
