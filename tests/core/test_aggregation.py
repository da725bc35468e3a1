from __future__ import annotations

from equipoise.core import aggregation
from equipoise.core.results import find
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat

CORRECT = {("ours", "clean"): [1, 1, 1, 0], ("ours", "a"): [1, 0, 1, 0], ("ours", "b"): [0, 1, 1, 0],
           ("theirs", "clean"): [1, 0, 1, 1], ("theirs", "a"): [1, 0, 1, 1]}
ROWS = [AttackRow(index=i, model=model, attack=attack, label=0, correct=bool(value))
        for (model, attack), values in CORRECT.items() for i, value in enumerate(values)]
THREAT = Threat("linf", 0.1)


def test_accuracies_with_intervals_and_the_worst_case() -> None:
    results = aggregation.accuracies(ROWS, THREAT)
    assert find(results, "ours", "clean").value == 0.75
    assert find(results, "ours", "worst").value == 0.25 and find(results, "theirs", "worst").value == 0.75
    assert all(result.n == 4 and result.low <= result.value <= result.high for result in results)


def test_only_attacked_results_have_a_threat() -> None:
    results = aggregation.accuracies(ROWS, THREAT)
    assert find(results, "ours", "clean").threat is None and find(results, "ours", "worst").threat == THREAT


def test_the_worst_case_counts_images_under_every_attack() -> None:
    rows = [row for row in ROWS if not (row.attack == "b" and row.index == 3)]
    assert find(aggregation.accuracies(rows, THREAT), "ours", "worst").n == 3


def test_paired_differences() -> None:
    differences = aggregation.differences(ROWS, [("ours", "theirs")], THREAT)
    assert {row.metric: row.value for row in differences} == {"clean": 0.0, "worst": -0.5}
