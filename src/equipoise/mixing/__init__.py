"""Mix an accurate and a robust classifier into one."""

from equipoise.mixing.cascade import CascadedClassifier
from equipoise.mixing.classifier import HardLabels, MixedClassifier
from equipoise.mixing.folder import load_gate, load_model, save, save_gate, save_mixture
from equipoise.mixing.formula import gate_of, mix
from equipoise.mixing.gate import Gate, new_gate
from equipoise.mixing.gated import GatedClassifier
from equipoise.mixing.gated_surrogates import AlphaPenalty, GatedSurrogate
from equipoise.mixing.logit_maps import LogitMap
from equipoise.mixing.provenance import FrontierMixture, Provenance

__all__ = [
    "AlphaPenalty",
    "CascadedClassifier",
    "FrontierMixture",
    "Gate",
    "GatedClassifier",
    "GatedSurrogate",
    "HardLabels",
    "LogitMap",
    "MixedClassifier",
    "Provenance",
    "gate_of",
    "load_gate",
    "load_model",
    "mix",
    "new_gate",
    "save",
    "save_gate",
    "save_mixture",
]
