"""How much of the study of adaptive smoothing is done: minutes on two cores, or what the paper did and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from equipoise.attacks import Apgd, Stage, Targeted
from equipoise.attacks.auto import VERSIONS
from equipoise.fitting.gated import GAPS, MOVES, short, short_both
from equipoise.training import TrainingPlan
from equipoise.training.objectives.gate import PLAN, SETTINGS

WEIGHTS = tuple((c_ce, round(1.5 - c_ce, 1), c_prod) for c_prod in (0.0, 0.1, 0.2) for c_ce in (0.0, 0.5, 1.0, 1.5))
SCALES = (0.5, 1.0, 2.0, 4.0)
SHIFTS = tuple(round(-8 + 0.1 * step, 1) for step in range(161))
FULL = replace(PLAN, flip=True, save_seconds=60, precision="bf16")
BRIEF = replace(FULL, epochs=1)
BEST = (0.0, 1.5, 0.2)  # c_CE, c_BCE, c_prod [Bai2024, Table 6]


@dataclass(frozen=True)
class AdaptiveStudySize:
    """How much is done; the defaults are the full size."""

    plan: TrainingPlan = FULL
    width: int = 96
    momentum: float = 0.05
    steps: int = 15  # of the training attacks; the paper has 75
    settings: tuple[str, ...] = SETTINGS
    keep: float = 0.93  # share of h's robust accuracy that every chosen mixture keeps on the images that choose
    keeps: tuple[float, ...] = (0.8, 0.87, 0.97)  # further shares, for the lines of mixtures without a gate
    gate_keeps: tuple[float, ...] = (0.97,)  # and of those with one
    version: Callable[[], list[Stage]] = VERSIONS["fast"]
    light: Callable[[], list[Stage]] = short
    strike: Callable[[], list[Stage]] = short
    both: Callable[[], list[Stage]] = short_both
    pgd: int = 20
    targets: tuple[float, ...] = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
    plain: tuple[float, ...] = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))
    thresholds: tuple[float, ...] = tuple(round(0.02 * step, 2) for step in range(1, 49))
    gaps: tuple[float, ...] = GAPS
    shifts: tuple[float, ...] = MOVES
    rounds: int = 6  # candidates of a kind attacked at most, for every share
    nuts: tuple[int, int] = (50, 9)  # steps and targets of the attack that fits the map
    ablation: TrainingPlan = BRIEF
    ablation_steps: int = 8
    weights: tuple[tuple[float, float, float], ...] = WEIGHTS
    scales: tuple[float, ...] = SCALES
    tested: int = 1000
    batch_size: int = 500


def _swift() -> list[Stage]:
    return [Apgd("margin", 10), Targeted(1, 8), Targeted(2, 8)]


SMOKE = AdaptiveStudySize(
    plan=TrainingPlan(epochs=4, batch_size=64, optimizer="adamw", lr=5e-3, weight_decay=1e-5, warmup=0.3, ema=0.8, clip=10.0,
              held_out=0),
    width=8, momentum=0.1, steps=8, keep=0.95, keeps=(0.8,), gate_keeps=(), strike=_swift,
    targets=(0.0, 0.5, 0.8, 0.95, 1.0), plain=tuple(round(0.5 + 0.02 * step, 2) for step in range(25)),
    thresholds=tuple(round(0.05 * step, 2) for step in range(1, 20)), gaps=(0.0, 0.1, 0.25, 0.5, 0.75, 0.95), rounds=3,
    nuts=(10, 3),
    ablation=TrainingPlan(epochs=2, batch_size=64, optimizer="adamw", lr=5e-3, weight_decay=1e-5, warmup=0.3, ema=0.8,
                  clip=10.0, held_out=0),
    ablation_steps=4, tested=120, batch_size=240)
SIZES = {"smoke": SMOKE, "full": AdaptiveStudySize()}
