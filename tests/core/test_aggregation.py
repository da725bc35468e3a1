from __future__ import annotations

from equipoise.core import aggregation, stats
from equipoise.core.results import find
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat

CORRECT = {
    ("ours", "clean"): [1, 1, 1, 0],
    ("ours", "a"): [1, 0, 1, 0],
    ("ours", "b"): [0, 1, 1, 0],
    ("theirs", "clean"): [1, 0, 1, 1],
    ("theirs", "a"): [1, 0, 1, 1],
}
ROWS = [
    AttackRow(index=i, model=model, attack=attack, label=0, correct=bool(value))
    for (model, attack), values in CORRECT.items()
    for i, value in enumerate(values)
]
THREAT = Threat("linf", 0.1)


def test_accuracies_with_intervals_and_the_worst_case() -> None:
    results = aggregation.accuracies(ROWS, THREAT)
    assert find(results, "ours", "clean").value == 0.75
    assert (
        find(results, "ours", "worst").value == 0.25
        and find(results, "theirs", "worst").value == 0.75
    )
    assert all(result.n == 4 and result.low <= result.value <= result.high for result in results)


def test_only_attacked_results_have_a_threat() -> None:
    results = aggregation.accuracies(ROWS, THREAT)
    assert (
        find(results, "ours", "clean").threat is None
        and find(results, "ours", "worst").threat == THREAT
    )


def test_the_worst_case_counts_images_under_every_attack() -> None:
    rows = [row for row in ROWS if not (row.attack == "b" and row.index == 3)]
    assert find(aggregation.accuracies(rows, THREAT), "ours", "worst").n == 3


def test_paired_differences() -> None:
    differences = aggregation.differences(ROWS, [("ours", "theirs")], THREAT)
    assert {row.metric: row.value for row in differences} == {"clean": 0.0, "worst": -0.5}


def test_shares_of_passes_of_a_randomised_model() -> None:
    """The worst attack is selected by the margin, whose passes are others than those of the
    share."""

    def row(index: int, attack: str, share: float, margin: float, model: str = "m") -> AttackRow:
        return AttackRow(
            index=index,
            model=model,
            attack=attack,
            label=0,
            correct=share > 0.5,
            margin=margin,
            share_correct=share,
            passes=10,
        )

    rows = [
        row(0, "clean", 0.9, 0.8),
        row(1, "clean", 0.6, 0.1),
        row(0, "rand", 0.7, 0.2),
        row(1, "rand", 0.5, 0.2),
        row(0, "clean", 0.4, 0.1, "n"),
        row(1, "clean", 0.5, 0.1, "n"),
    ]
    results = aggregation.accuracies(rows, THREAT)
    for metric, shares in (("clean", [0.9, 0.6]), ("rand", [0.7, 0.5]), ("worst", [0.7, 0.6])):
        found, expected = find(results, "m", metric), stats.mean_share(shares, 10)
        assert (found.value, found.low, found.high, found.passes) == (
            expected.value,
            expected.low,
            expected.high,
            10,
        )
    difference = aggregation.differences(rows, [("m", "n")], THREAT)[0]
    assert difference.metric == "clean" and abs(difference.value - 0.3) < 1e-12
    assert difference.low < 0.3 < difference.high


def test_classes_of_a_randomised_model_add_up_to_its_results() -> None:
    """Every image is right in most passes, and counts with its share."""
    rows = [
        AttackRow(
            index=i,
            model="m",
            attack=attack,
            label=i % 3,
            correct=True,
            margin=share,
            share_correct=share,
            passes=10,
        )
        for i in range(12)
        for attack, share in (("clean", 0.9), ("a", 0.6), ("b", 0.8))
    ]
    classes, results = aggregation.by_class(rows), aggregation.accuracies(rows, THREAT)
    assert [(item.label, item.n) for item in classes] == [(0, 4), (1, 4), (2, 4)]
    for metric, values in (
        ("clean", [item.clean for item in classes]),
        ("worst", [item.attacked for item in classes]),
    ):
        assert abs(sum(values) / 12 - find(results, "m", metric).value) < 1e-12
    assert abs(classes[0].clean - 3.6) < 1e-12 and abs(classes[0].attacked - 2.4) < 1e-12


def test_of_several_attacks_that_broke_an_image_the_smallest_margin_is_the_worst() -> None:
    rows = [
        AttackRow(index=0, model="m", attack=attack, label=0, correct=margin > 0, margin=margin)
        for attack, margin in (("clean", 0.2), ("a", -0.1), ("b", -0.4), ("c", 0.1))
    ]
    assert (
        aggregation.worst_row(rows).attack == "b" and aggregation.worst_row(rows[::3]).attack == "c"
    )
    assert [
        aggregation.base_models_first(name) for name in ("mixed", "other", "accurate", "robust")
    ] == [2, 3, 0, 1]
