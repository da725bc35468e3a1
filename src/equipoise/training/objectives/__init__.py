"""The training objectives by name."""

from __future__ import annotations

from equipoise.core.registry import Registry
from equipoise.training.objective import Objective
from equipoise.training.objectives.adversarial import IAAT, TRADES, Adversarial, Standard
from equipoise.training.objectives.smoothing import (
    MACER,
    Consistency,
    Gaussian,
    SmoothAdv,
    SmoothMix,
    Stability,
)

__all__ = [
    "IAAT",
    "MACER",
    "OBJECTIVES",
    "TRADES",
    "Adversarial",
    "Consistency",
    "Gaussian",
    "SmoothAdv",
    "SmoothMix",
    "Stability",
    "Standard",
]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "equipoise.objectives",
    "objective",
    {
        cls.name: cls
        for cls in (
            Standard,
            Adversarial,
            TRADES,
            IAAT,
            Gaussian,
            Stability,
            SmoothAdv,
            MACER,
            Consistency,
            SmoothMix,
        )
    },
)
