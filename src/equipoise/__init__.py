"""Equipoise: one classifier that is both accurate and robust, out of two.

    import equipoise as eq

    threat = eq.Threat("linf", "8/255")
    fit = eq.fit(accurate, robust, images, threat=threat)
    print(eq.evaluate(fit.mixture, other_images, threat=threat, attack="fast"))

Letters used in docstrings: `B` batch, `C, H, W` image, `K` classes, `S` noise samples, `R` radii,
`T` steps. Images are in [0, 1]; models map them to logits `(B, K)`. The names below are loaded when
they are first used, so that `import equipoise` is quick.
"""

import sys as _sys

# `python -m equipoise` puts the current directory on the import path, which may be a folder
# received from somebody else. It is removed before any other import, while runpy says "-m", and
# only for this command.
if _sys.argv[:1] == ["-m"] and not _sys.flags.safe_path and "equipoise" in _sys.orig_argv[1:4]:
    del _sys.path[0]

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from equipoise.core.checks import InputError as InputError
    from equipoise.core.threat import Threat as Threat
    from equipoise.data import Dataset as Dataset
    from equipoise.data import load_data as load_data
    from equipoise.evaluation import attack as attack
    from equipoise.evaluation import certify as certify
    from equipoise.evaluation import evaluate as evaluate
    from equipoise.fitting import fit as fit
    from equipoise.mixing import MixedClassifier as MixedClassifier
    from equipoise.mixing import load_model as load_model
    from equipoise.mixing import save as save
    from equipoise.reporting import report as report
    from equipoise.training import train as train

_HOME = {
    "InputError": "core.checks",
    "Threat": "core.threat",
    "Dataset": "data",
    "load_data": "data",
    "attack": "evaluation",
    "certify": "evaluation",
    "evaluate": "evaluation",
    "fit": "fitting",
    "MixedClassifier": "mixing",
    "load_model": "mixing",
    "save": "mixing",
    "report": "reporting",
    "train": "training",
}
__all__ = [
    "Dataset",
    "InputError",
    "MixedClassifier",
    "Threat",
    "attack",
    "certify",
    "evaluate",
    "fit",
    "load_data",
    "load_model",
    "report",
    "save",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(_import_module(f"equipoise.{_HOME[name]}"), name)
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
