"""How much of the study of local smoothing is done: minutes on two cores, or what the papers did."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.training import TrainingPlan


@dataclass(frozen=True)
class LocalStudySize:
    """How much is done; the defaults are those of the papers where they say."""

    neighbours: tuple[int, ...] = (1, 5, 20, 100)
    weighted: tuple[int, ...] = (5, 20, 100)
    neighbour_gammas: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 10.0)
    weights: tuple[float, ...] = (0.4, 0.7, 0.9, 0.98)
    steps: int = 10
    policy: TrainingPlan = field(default_factory=lambda: TrainingPlan(epochs=3, batch_size=250, optimizer="adamw", lr=1e-3,
                                                      weight_decay=1e-4, held_out=0, compile="off"))
    width: int = 64
    trust: str = "top-ratio"  # of the policy's rule: the fast variant
    long: tuple[int, ...] = (20, 100)
    eps_factors: tuple[float, ...] = (0.5, 0.75, 1.25, 1.5)
    auto: int = 200
    version: str = "standard"
    batch_size: int = 500  # Jacobians of all classes are told apart one by one: few large batches, or a GPU waits


SMOKE = LocalStudySize(neighbours=(1, 5, 20), weighted=(5, 20), neighbour_gammas=(1e-2, 0.1, 1.0, 100.0),
             weights=(0.4, 0.75, 0.95),
             policy=TrainingPlan(epochs=4, batch_size=64, optimizer="adamw", lr=2e-3, weight_decay=1e-4, held_out=0), width=16,
             long=(20,), eps_factors=(0.5, 1.5), auto=40, version="fast", batch_size=128)
SIZES = {"smoke": SMOKE, "full": LocalStudySize()}
