"""From rows to results: accuracies with intervals, the worst case over attacks, paired differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from equipoise.core import stats
from equipoise.core.records import Row
from equipoise.core.threat import Threat

Group = tuple[str, float | None]  # model, alpha
Verdicts = dict[int, bool]  # image index → answered rightly


def verdicts(rows: Iterable[Row]) -> dict[Group, dict[str, Verdicts]]:
    """For every model (and alpha, where rows carry one) and attack: which images were answered rightly.

    "worst" is the worst case over every attack of the run, the clean image included, over the images
    that every attack has seen.
    """
    seen: dict[Group, dict[str, Verdicts]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        seen[row["model"], row.get("alpha")][row["attack"]][row["index"]] = bool(row["correct"])
    for attacks in seen.values():
        if attacks.keys() - {"clean"}:
            common = set.intersection(*(set(verdict) for verdict in attacks.values()))
            attacks["worst"] = {i: all(verdict[i] for verdict in list(attacks.values())) for i in sorted(common)}
    return {group: dict(attacks) for group, attacks in seen.items()}


def results(rows: Iterable[Row], threat: Threat | None) -> list[Row]:
    """One result per model and metric, as in `summary.json`."""
    found = []
    for (model, alpha), attacks in sorted(verdicts(rows).items(), key=lambda item: _place(item[0])):
        for metric, verdict in attacks.items():
            estimate = stats.clopper_pearson(sum(verdict.values()), len(verdict))
            found.append(_result(model, alpha, metric, estimate, threat))
    return found


def differences(rows: Iterable[Row], pairs: Sequence[tuple[str, str]], threat: Threat | None) -> list[Row]:
    """Paired differences of accuracy between two models on the images both have seen."""
    seen = verdicts(rows)
    found = []
    for first, second in pairs:
        ours, theirs = seen.get((first, None), {}), seen.get((second, None), {})
        for metric in ours.keys() & theirs.keys() & {"clean", "worst"}:
            common = ours[metric].keys() & theirs[metric].keys()
            gained = sum(ours[metric][i] and not theirs[metric][i] for i in common)
            lost = sum(theirs[metric][i] and not ours[metric][i] for i in common)
            estimate = stats.paired_difference(gained, lost, len(common))
            found.append({**_result(first, None, metric, estimate, threat), "versus": second})
    return sorted(found, key=lambda row: (row["model"], row["versus"], row["metric"]))


def _place(group: Group) -> tuple[int, str, float]:
    """The two bases first, then their mixture, then the rest by name."""
    model, alpha = group
    order = ("accurate", "robust", "mixed")
    return (order.index(model) if model in order else len(order), model, -1.0 if alpha is None else alpha)


def _result(model: str, alpha: float | None, metric: str, e: stats.Estimate, threat: Threat | None) -> Row:
    result: dict[str, Any] = {"model": model, "metric": metric, "value": e.value, "low": e.low, "high": e.high,
                              "n": e.n}
    if alpha is not None:
        result["alpha"] = alpha
    if threat is not None and metric != "clean":
        result["threat"] = threat.facts()
    return result


def value(results: Iterable[Row], model: str, metric: str) -> float:
    """The value of one result."""
    return next(float(row["value"]) for row in results if (row["model"], row["metric"]) == (model, metric))
