"""Locally biased smoothing [Anderson2022] [Bai2022]: rules, oracles, adaptive policy and radii."""

from equipoise.local_smoothing.crossing import attack_at_strengths, find_crossing
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.policy import AdaptiveSmoothing
from equipoise.local_smoothing.radii import largest_radius, theorem_1_bound, theorem_2_bound
from equipoise.local_smoothing.smoothing import BinarySmoothing, SmoothedClassifier

__all__ = [
    "AdaptiveSmoothing",
    "BinarySmoothing",
    "Neighbours",
    "SmoothedClassifier",
    "attack_at_strengths",
    "find_crossing",
    "largest_radius",
    "theorem_1_bound",
    "theorem_2_bound",
]
