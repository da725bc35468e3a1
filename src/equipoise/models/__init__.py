"""Classifiers: the zoo of architectures, checkpoints, and references that name a model in one string."""

from equipoise.models.checkpoint import facts, model_identity, weights_digest
from equipoise.models.normalize import Normalize, Normalized
from equipoise.models.probe import probe
from equipoise.models.reference import SCHEMES, Reference, digest, load, parse, placed
from equipoise.models.tta import TTAClassifier
from equipoise.models.zoo import ARCHITECTURES, build

__all__ = [
    "ARCHITECTURES",
    "SCHEMES",
    "Normalize",
    "Normalized",
    "Reference",
    "TTAClassifier",
    "build",
    "digest",
    "facts",
    "load",
    "model_identity",
    "parse",
    "placed",
    "probe",
    "weights_digest",
]
