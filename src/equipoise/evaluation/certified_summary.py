"""What the rows of certificates add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from equipoise.certification import ABSTAIN, SmoothingPlan, mixture
from equipoise.core import stats
from equipoise.core.records import Row

ATTACK = "certify"  # in the place where other rows name their attack
STEP = 0.25  # between the radii of the summary


def down(value: float) -> float:
    """Six decimals, never rounded up."""
    return math.floor(value * 1e6) / 1e6


def results_of(rows: Sequence[Row], plan: SmoothingPlan) -> list[Row]:
    """ACR, certified accuracy at steps of 0.25, abstentions, clean accuracy and cost of every model."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        if row["attack"] == ATTACK:
            groups.setdefault((row["model"], row.get("alpha")), []).append(row)
    return [result for (model, alpha), own in groups.items() for result in _results(model, alpha, own, plan)]


def _results(model: str, alpha: float | None, rows: Sequence[Row], plan: SmoothingPlan) -> list[Row]:
    sigma = rows[0].get("sigma", plan.sigma)
    most = max(sigma * float(ndtri(plan.failure ** (1 / plan.samples))), 0.0)  # few samples certify nothing
    reach = np.array([row["radius"] if row["correct"] else 0.0 for row in rows])
    acr = stats.mean(reach.tolist())
    metrics: dict[str, stats.Estimate] = {
        "acr": stats.Estimate(acr.value, max(acr.low, 0.0), min(acr.high, most), acr.n)}
    for step in range(max(int(most / STEP), 1) + 1):
        count = int((reach >= step * STEP).sum()) if step else sum(row["correct"] for row in rows)
        metrics[f"certified@{step * STEP:.2f}"] = stats.clopper_pearson(count, len(rows))
    metrics["abstained"] = stats.share(row["predicted"] == ABSTAIN for row in rows)
    metrics["clean"] = stats.share(row["answer"] == row["label"] for row in rows)
    if alpha is not None:
        # By estimated probabilities, without abstaining: what alpha was chosen for.
        metrics["clean-estimate"] = stats.share(np.equal(mixture.winners(mixture.Base.of_rows(rows, plan.sigma), alpha),
                                                    [row["label"] for row in rows]).tolist())
    samples = stats.mean([float(row["samples"]) for row in rows])
    metrics["samples"] = stats.Estimate(samples.value, max(samples.low, 0.0), min(samples.high, 2.0 * plan.samples),
                                        samples.n)
    told = {"model": model} if alpha is None else {"model": model, "alpha": alpha}
    return [{**told, "metric": metric, "value": e.value, "low": e.low, "high": e.high, "n": e.n,
             "sigma": sigma} for metric, e in metrics.items()]
