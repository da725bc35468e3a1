"""Read the official CIFAR pickles without running anything that a pickle could contain.

A pickle is a program that may call whatever it can name. Here it can name six things, and each stands for a
plain record of ours: not even numpy's own reconstruction runs. Everything else is refused by name.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equipoise.core.checks import InputError, require


class _Kind:
    """Stands for numpy.dtype: only bytes pass."""

    def __init__(self, code: bytes | str, align: object = None, copy: object = None) -> None:
        text = code.decode("ascii") if isinstance(code, bytes) else code
        if text != "u1":
            raise InputError(f"arrays of uint8, got an array of {text!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and fields mean nothing for single bytes."""


class _Array:
    """Stands for numpy's `_reconstruct`: the array arrives as (version, shape, kind, fortran, bytes)."""

    values: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def __init__(self, *blueprint: object) -> None:
        """The blueprint is always that of an empty array."""

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Kind, bool, bytes]) -> None:
        _, shape, _, fortran, data = state
        if not isinstance(data, bytes) or len(data) != math.prod(shape):
            raise InputError(f"arrays with as many bytes as their shape {shape} says, got another number")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Reader(pickle.Unpickler):
    """An unpickler whose whole world is uint8 arrays, bytes, numbers, lists and dicts."""

    def find_class(self, module: str, name: str) -> object:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct":
                return _Array
            case "numpy", "ndarray":
                return None  # only ever the first argument of `_reconstruct`, which does not look at it
            case "numpy", "dtype":
                return _Kind
            case "_codecs", "encode":
                # Made anew each time, so that no pickle can leave a mark on it.
                return lambda text, encoding: str.encode(text, "latin1")
            case _:
                raise InputError(f"plain arrays and lists, got a call for {module}.{name} (refused)")


def load(path: Path) -> dict[bytes, object]:
    """The dict that a pickle of Python 2 or 3 holds; its arrays are uint8 and its text is bytes."""
    try:
        content = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except InputError as problem:
        raise InputError(f"`{path}` must hold {problem}") from None
    except Exception as problem:  # a damaged pickle program can fail in any way
        raise InputError(f"`{path}` must be a pickle, got a damaged file ({problem})") from None
    require(isinstance(content, dict), str(path), "hold a dict", type(content).__name__)
    return {key: value.values if isinstance(value, _Array) else value for key, value in content.items()}
