"""Radii of Theorems 1 and 2 [Bai2022] with constants found by a search of the ball: estimates,
never certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.core import rng, stats
from equipoise.core.records import Run
from equipoise.core.results import Result
from equipoise.core.rng import Stream
from equipoise.core.rows import RadiusRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions
from equipoise.evaluation.measure import measure_batches
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.radii import (
    estimate_theorem_1_constants,
    estimate_theorem_2_constants,
    largest_radius,
    theorem_1_bound,
    theorem_2_bound,
)
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.local_rules import alpha_of

RADIUS, POSITIVE = "radius", "positive"


def estimate_radii(
    rule: SmoothedClassifier, x: Tensor, radii: Sequence[float], stream: Stream, steps: int = 10
) -> tuple[Tensor, Tensor]:
    """(B,) the largest of the radii that the theorem of the rule allows (0 if none), and (B,) the
    predicted classes.

    Theorem 1 is for plain votes of neighbours with trust ‖∇g_i‖, and only within the radius where
    they are constant; Theorem 2 for a network as the oracle with trust ‖∇g_i‖/‖∇h_i‖. `steps` are
    those of the search for the constants.
    """
    norm, gamma = str(rule.norm), rule.gamma
    with torch.no_grad():
        g, h, trust, _ = rule.sides_and_trust(x)
        scores = rule.combine(g, h, trust, rule.gate)

    def bound(radius: float) -> tuple[Tensor, bool]:
        threat = Threat(norm, radius)
        if isinstance(rule.oracle, Neighbours):
            constants = estimate_theorem_1_constants(
                rule.accurate, x, threat=threat, gamma=gamma, stream=stream, steps=steps
            )
            value = theorem_1_bound(scores, g, trust, gamma, constants)
            return torch.where(
                rule.oracle.constant_vote_radius(x, norm) >= radius, value, 0.0
            ), False
        of_g, of_h = (
            estimate_theorem_2_constants(side, x, threat=threat, stream=stream, steps=steps)
            for side in (rule.accurate, rule.oracle)
        )
        return theorem_2_bound(scores, trust, gamma, of_g, of_h, rule.floor), False

    return largest_radius(bound, radii).value.expand(len(x)), scores.argmax(dim=1)


def measure_estimates(
    run: Run,
    rules: Mapping[str, SmoothedClassifier],
    data: Dataset,
    radii: Sequence[float],
    conditions: Conditions,
) -> list[Result]:
    """Rows of every rule, and results: the mean radius, and the share of images whose radius is
    positive."""
    for name, rule in rules.items():
        theorem = "theorem-1" if isinstance(rule.oracle, Neighbours) else "theorem-2"
        alpha = alpha_of(rule.gamma)

        def compute(
            batch: Dataset,
            name: str = name,
            rule: SmoothedClassifier = rule,
            theorem: str = theorem,
            alpha: float = alpha,
        ) -> list[Row]:
            x = pixels(batch.images.to(conditions.device))
            stream = rng.stream(conditions.seed, theorem, batch.index.to(conditions.device))
            columns = (batch.index, batch.labels, *estimate_radii(rule, x, radii, stream))
            return [
                RadiusRow(
                    index=index,
                    model=name,
                    attack=theorem,
                    alpha=alpha,
                    label=label,
                    predicted=predicted,
                    correct=predicted == label,
                    radius=radius,
                    exact=False,
                )
                for index, label, radius, predicted in zip(
                    *(c.tolist() for c in columns), strict=True
                )
            ]

        measure_batches(
            run,
            data,
            keys=lambda index, key=(name, theorem, alpha): [(index, *key)],  # type: ignore[misc]
            compute=compute,
            batch_size=conditions.batch_size,
            title=f"{name}, {theorem}",
        )
    results = []
    for name, rule in rules.items():
        own = [
            row.radius for row in run.finish() if isinstance(row, RadiusRow) and row.model == name
        ]
        for metric, estimate in (
            (RADIUS, stats.mean(own)),
            (POSITIVE, stats.share(radius > 0 for radius in own)),
        ):
            results.append(
                Result.of(name, metric, estimate, alpha=alpha_of(rule.gamma), is_estimate=True)
            )
    return results
