"""The ten training methods, one file each, and their names."""

from __future__ import annotations

from equipoise.train.objective import Objective
from equipoise.train.objectives.adversarial import Adversarial as Adversarial
from equipoise.train.objectives.consistency import Consistency as Consistency
from equipoise.train.objectives.gaussian import Gaussian as Gaussian
from equipoise.train.objectives.iaat import Iaat as Iaat
from equipoise.train.objectives.macer import Macer as Macer
from equipoise.train.objectives.smoothadv import SmoothAdv as SmoothAdv
from equipoise.train.objectives.smoothmix import SmoothMix as SmoothMix
from equipoise.train.objectives.stability import Stability as Stability
from equipoise.train.objectives.standard import Standard as Standard
from equipoise.train.objectives.trades import Trades as Trades

OBJECTIVES: dict[str, type[Objective]] = {
    "standard": Standard, "adversarial": Adversarial, "trades": Trades, "iaat": Iaat,
    "gaussian": Gaussian, "stability": Stability, "smoothadv": SmoothAdv, "macer": Macer,
    "consistency": Consistency, "smoothmix": SmoothMix,
}
