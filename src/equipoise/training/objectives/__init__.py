"""The ten training methods, one file each, and their names."""

from __future__ import annotations

from equipoise.training.objective import Objective
from equipoise.training.objectives.adversarial import Adversarial as Adversarial
from equipoise.training.objectives.consistency import Consistency as Consistency
from equipoise.training.objectives.gaussian import Gaussian as Gaussian
from equipoise.training.objectives.iaat import Iaat as Iaat
from equipoise.training.objectives.macer import Macer as Macer
from equipoise.training.objectives.smoothadv import SmoothAdv as SmoothAdv
from equipoise.training.objectives.smoothmix import SmoothMix as SmoothMix
from equipoise.training.objectives.stability import Stability as Stability
from equipoise.training.objectives.standard import Standard as Standard
from equipoise.training.objectives.trades import Trades as Trades

OBJECTIVES: dict[str, type[Objective]] = {
    "standard": Standard, "adversarial": Adversarial, "trades": Trades, "iaat": Iaat,
    "gaussian": Gaussian, "stability": Stability, "smoothadv": SmoothAdv, "macer": Macer,
    "consistency": Consistency, "smoothmix": SmoothMix,
}
