"""Classifiers: a zoo of architectures, checkpoints, and references that name a model in one string."""

from equipoise.models.checkpoint import read_metadata
from equipoise.models.inspection import check_forward, identity, name_failing_model, weights_digest
from equipoise.models.preprocessing import Normalize, Normalized, TTAClassifier
from equipoise.models.reference import SCHEMES, LoadOptions, Reference, load, parse, reference_of, relocate, runs_code
from equipoise.models.smoothed import RandomlySmoothedClassifier
from equipoise.models.zoo import ARCHITECTURES, build

__all__ = [
    "ARCHITECTURES", "SCHEMES", "LoadOptions", "Normalize", "Normalized", "RandomlySmoothedClassifier", "Reference",
    "TTAClassifier", "build", "check_forward", "identity", "load", "name_failing_model", "parse", "read_metadata",
    "reference_of", "relocate", "runs_code", "weights_digest",
]
