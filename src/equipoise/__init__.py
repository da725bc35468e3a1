"""Equipoise: one classifier that is both accurate and robust, out of two.

Letters used in every docstring: `B` batch, `C, H, W` image, `K` classes, `S` noise samples, `R` radii,
`T` steps. Images are in [0, 1]; models answer with logits `(B, K)`.

The names below are the public door, opened when they are first used, so that `import equipoise` is quick.
Functions named like their room are taken from it: `from equipoise.evaluation import evaluate`.
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from equipoise.attacks import auto_attack as auto_attack
    from equipoise.attacks.minimum_margin import minimum_margin as minimum_margin
    from equipoise.attacks.pgd import pgd as pgd
    from equipoise.certification import predict as predict
    from equipoise.core.rng import stream as stream
    from equipoise.core.threat import Threat as Threat
    from equipoise.data import Dataset as Dataset
    from equipoise.mixing import MixedClassifier as MixedClassifier
    from equipoise.mixing import load as load
    from equipoise.mixing import mix as mix
    from equipoise.mixing import save as save

_PACKAGES = ("attacks", "certification", "core", "data", "evaluation", "fitting", "local_smoothing", "mixing", "models",
             "reporting", "studies", "training")
_PUBLIC = {
    "attacks": ("auto_attack", "minimum_margin", "pgd"), "certification": ("predict",), "data": ("Dataset",),
    "mixing": ("MixedClassifier", "load", "mix", "save"), "core.rng": ("stream",), "core.threat": ("Threat",),
}
_HOME = {name: package for package, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(_import(f"equipoise.{_HOME[name]}"), name)
    if name in _PACKAGES:
        return _import(f"equipoise.{name}")
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_PACKAGES])
