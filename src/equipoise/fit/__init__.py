"""From attacks and cached logits to a `MixedClassifier`."""

from equipoise.fit.cache import Cache as Cache
from equipoise.fit.nuts import fit as fit
from equipoise.fit.points import Strength as Strength
from equipoise.fit.promise import Target as Target
from equipoise.fit.promise import beta as beta
from equipoise.fit.promise import lose_at_most as lose_at_most
from equipoise.fit.promised import Fit as Fit
from equipoise.fit.settings import Settings as Settings
