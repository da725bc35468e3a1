from __future__ import annotations

from equipoise.core.format import accuracy_table
from equipoise.core.results import Result


def test_five_metrics_fit_into_eighty_columns() -> None:
    metrics = ("clean", "fast", "adaptive", "adaptive-lowered", "worst")
    text = accuracy_table(
        [
            Result(model=model, metric=metric, value=0.4, low=0.191, high=0.639, n=20)
            for model in ("accurate", "mixed")
            for metric in metrics
        ],
        "ℓ∞ ≤ 8/255",
    )
    assert text.count("[19.1, 63.9]") == 2 * len(metrics) and "…" not in text and "lowered" in text
    assert max(map(len, text.splitlines())) <= 80


def test_results_at_several_alphas_are_left_out() -> None:
    results = [
        Result(model="mixed", metric="clean", value=0.4, low=0.1, high=0.7, n=9, alpha=alpha)
        for alpha in (None, 0.5)
    ]
    assert accuracy_table(results, "here").count("mixed") == 1
