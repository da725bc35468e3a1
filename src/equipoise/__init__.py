"""Equipoise: one classifier that is both accurate and robust, out of two.

Letters used in every docstring: `B` batch, `C, H, W` image, `K` classes, `S` noise samples, `R` radii,
`T` steps. Images are in [0, 1]; models answer with logits `(B, K)`.

These names are the public door. Those of rooms (`evaluate`) are functions here; the room itself is reached by
`from equipoise.evaluate import …`.
"""

__version__ = "0.1.0"

from equipoise.attacks import pgd as pgd
from equipoise.data import Dataset as Dataset
from equipoise.evaluate import Conditions as Conditions
from equipoise.evaluate import evaluate as evaluate
from equipoise.mixing import MixedClassifier as MixedClassifier
from equipoise.mixing import load as load
from equipoise.mixing import mix as mix
from equipoise.mixing import save as save
from equipoise.rng import stream as stream
from equipoise.threat import Threat as Threat
