"""Classifiers: the zoo of architectures, checkpoints, and references that name a model in one string."""

from equipoise.models.checkpoint import facts, known_by, weights_digest
from equipoise.models.looks import Looks
from equipoise.models.normalize import Normalize, Normalized
from equipoise.models.probe import probe
from equipoise.models.reference import SCHEMES, Reference, digest, load, parse, placed
from equipoise.models.zoo import ARCHITECTURES, build

__all__ = [
    "ARCHITECTURES", "SCHEMES", "Looks", "Normalize", "Normalized", "Reference", "build", "digest", "facts",
    "known_by", "load", "parse", "placed", "probe", "weights_digest",
]
