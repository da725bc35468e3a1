"""Equipoise: one classifier that is both accurate and robust, out of two.

Letters used in every docstring: `B` batch, `C, H, W` image, `K` classes, `S` noise samples, `R` radii,
`T` steps. Images are in [0, 1]; models answer with logits `(B, K)`.

The names below are the public door, opened when they are first used, so that `import equipoise` is quick.
Functions named like their room are taken from it: `from equipoise.evaluate import evaluate`.
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from equipoise.attacks import auto_attack as auto_attack
    from equipoise.attacks.minimum_margin import minimum_margin as minimum_margin
    from equipoise.attacks.pgd import pgd as pgd
    from equipoise.certify import predict as predict
    from equipoise.data import Dataset as Dataset
    from equipoise.mixing import MixedClassifier as MixedClassifier
    from equipoise.mixing import load as load
    from equipoise.mixing import mix as mix
    from equipoise.mixing import save as save
    from equipoise.rng import stream as stream
    from equipoise.threat import Threat as Threat

_ROOMS = ("attacks", "certify", "data", "evaluate", "fit", "mixing", "models", "report", "studies", "train")
_DOOR = {
    "attacks": ("auto_attack", "minimum_margin", "pgd"), "certify": ("predict",), "data": ("Dataset",),
    "mixing": ("MixedClassifier", "load", "mix", "save"), "rng": ("stream",), "threat": ("Threat",),
}
_HOME = {name: room for room, names in _DOOR.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(_import(f"equipoise.{_HOME[name]}"), name)
    if name in _ROOMS:
        return _import(f"equipoise.{name}")
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_ROOMS])
