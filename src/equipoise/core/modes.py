"""Evaluation mode with frozen parameters, as a context; and functions that need gradients whatever
the caller does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Saved:
    """A flag that is off for now."""

    owner: nn.Module | Tensor  # held, so that its id is not used again
    before: bool
    users: int = 0


_saved: dict[tuple[int, str], _Saved] = {}  # by id and name of the flag
_lock = threading.Lock()


@contextmanager
def inference(*modules: nn.Module | None) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside; every flag as before outside.

    Each submodule has its own flag: the frozen base of a mixture that is being trained stays in
    evaluation mode. Contexts may be nested and may overlap in several threads: the first one that
    uses a flag saves it, the last one restores it.
    """
    flags: dict[tuple[int, str], nn.Module | Tensor] = {}
    for module in (module for module in modules if module is not None):
        flags.update({(id(sub), "training"): sub for sub in module.modules()})
        flags.update(
            {(id(parameter), "requires_grad"): parameter for parameter in module.parameters()}
        )
    with _lock:
        for key, owner in flags.items():
            saved = _saved.setdefault(key, _Saved(owner, getattr(owner, key[1])))
            saved.users += 1
            setattr(owner, key[1], False)
    try:
        yield
    finally:
        with _lock:
            for key in flags:
                saved = _saved[key]
                saved.users -= 1
                if not saved.users:
                    setattr(saved.owner, key[1], _saved.pop(key).before)


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves `torch.inference_mode` while it runs, in which Lightning validates and
    tests models.

    Tensors made inside that mode can never have gradients, so neither models nor images may be made
    there.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run
