"""Aggregate per-image rows into accuracies with confidence intervals, worst cases and paired differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from equipoise.core import stats
from equipoise.core.results import Difference, Result
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat

CLEAN, WORST = "clean", "worst"
ModelAndAlpha = tuple[str, float | None]
Correct = dict[int, bool]  # image index → classified correctly


def correct_by_attack(rows: Iterable[Row]) -> dict[ModelAndAlpha, dict[str, Correct]]:
    """For every model (and alpha, where rows have one) and attack: which images are classified correctly.

    "worst" is the worst case over every attack of the run, the clean image included, on the images that every
    attack has been run on.
    """
    table: dict[ModelAndAlpha, dict[str, Correct]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if isinstance(row, AttackRow):
            table[row.model, row.alpha][row.attack][row.index] = row.correct
    for attacks in table.values():
        if attacks.keys() - {CLEAN}:
            common = set.intersection(*(set(correct) for correct in attacks.values()))
            attacks[WORST] = {i: all(correct[i] for correct in list(attacks.values())) for i in sorted(common)}
    return {group: dict(attacks) for group, attacks in table.items()}


def accuracies(rows: Iterable[Row], threat: Threat | None) -> list[Result]:
    """One result per model and attack, and for the worst case over all attacks."""
    results = []
    for (model, alpha), attacks in sorted(correct_by_attack(rows).items(), key=lambda item: _model_order(item[0])):
        for metric, correct in attacks.items():
            estimate = stats.clopper_pearson(sum(correct.values()), len(correct))
            results.append(Result.of(model, metric, estimate, alpha=alpha, threat=None if metric == CLEAN else threat))
    return results


def differences(rows: Iterable[Row], pairs: Sequence[tuple[str, str]], threat: Threat | None) -> list[Difference]:
    """Paired differences of clean and worst-case accuracy between two models on the images both were run on."""
    table = correct_by_attack(rows)
    compared = []
    for model, versus in pairs:
        ours, theirs = table.get((model, None), {}), table.get((versus, None), {})
        for metric in ours.keys() & theirs.keys() & {CLEAN, WORST}:
            common = ours[metric].keys() & theirs[metric].keys()
            gained = sum(ours[metric][i] and not theirs[metric][i] for i in common)
            lost = sum(theirs[metric][i] and not ours[metric][i] for i in common)
            compared.append(Difference(**vars(stats.paired_difference(gained, lost, len(common))), model=model,
                                    versus=versus, metric=metric, threat=None if metric == CLEAN else threat))
    return sorted(compared, key=lambda row: (row.model, row.versus, row.metric or ""))


def _model_order(group: ModelAndAlpha) -> tuple[int, str, float]:
    """The two base models first, then their mixture, then the rest by name."""
    model, alpha = group
    order = ("accurate", "robust", "mixed")
    return (order.index(model) if model in order else len(order), model, -1.0 if alpha is None else alpha)
