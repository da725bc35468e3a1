"""Classifiers: a zoo of architectures, checkpoints, and references that name a model in one
string."""

from equipoise.models.architectures.zoo import ARCHITECTURES, build
from equipoise.models.checkpoint import read_metadata
from equipoise.models.inspection import check_forward, identity, name_failing_model, weights_digest
from equipoise.models.layers.normalization import Normalize, Normalized
from equipoise.models.layers.smoothed import RandomlySmoothedClassifier
from equipoise.models.layers.tta import TTAClassifier
from equipoise.models.loaded import (
    LoadedModel,
    ModelInfo,
    full_reference_of,
    info_of,
    note_loaded,
    reference_of,
    require_used,
)
from equipoise.models.options import LoadOptions, ModelSettings
from equipoise.models.outputs import as_classifier, unwrap_outputs
from equipoise.models.reference import SCHEMES, Reference, load, parse, relocate, runs_code
from equipoise.models.sources.black_box import BlackBox, has_gradients

__all__ = [
    "ARCHITECTURES",
    "SCHEMES",
    "BlackBox",
    "LoadOptions",
    "LoadedModel",
    "ModelInfo",
    "ModelSettings",
    "Normalize",
    "Normalized",
    "RandomlySmoothedClassifier",
    "Reference",
    "TTAClassifier",
    "as_classifier",
    "build",
    "check_forward",
    "full_reference_of",
    "has_gradients",
    "identity",
    "info_of",
    "load",
    "name_failing_model",
    "note_loaded",
    "parse",
    "read_metadata",
    "reference_of",
    "relocate",
    "require_used",
    "runs_code",
    "unwrap_outputs",
    "weights_digest",
]
