"""From attacks and cached logits to a `MixedClassifier`."""

from equipoise.fitting.cache import Cache as Cache
from equipoise.fitting.calibration import Fit as Fit
from equipoise.fitting.conformal import Target as Target
from equipoise.fitting.conformal import beta as beta
from equipoise.fitting.conformal import lose_at_most as lose_at_most
from equipoise.fitting.margin_attack import AttackStrength as AttackStrength
from equipoise.fitting.mixednuts import fit as fit
from equipoise.fitting.settings import FitSettings as FitSettings
