"""Tensors by name, from and to files; what the tensors mean is no matter here.

Reading never executes anything, and a damaged or foreign file is one sentence that names it.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from equipoise.core.checks import InputError

_WRAPPINGS = ("state_dict", "model", "model_state_dict")


def need_file(path: Path) -> None:
    """A file is there."""
    got = "a folder" if path.is_dir() else "nothing there"
    if not path.is_file():
        raise InputError(f"`{path}` must be a file, got {got}")


def read_safetensors(path: Path, *, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (unless `weights` is false) and the metadata of a file."""
    need_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()} if weights else {}  # noqa: SIM118
            return state, file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        message = f"`{path}` must be a whole safetensors file, got one that cannot be read ({error})"
        raise InputError(message) from None


def read_torch(path: Path) -> dict[str, Tensor]:
    """The state dict of a torch file, unwrapped; nothing in the file is executed."""
    need_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old pickles; the sentence below says all there is to say
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        message = f"`{path}` must hold weights only, got something else, of which nothing was executed"
        raise InputError(message) from None
    except Exception as error:  # what a damaged file raises is any kind of error
        raise InputError(f"`{path}` must be a whole torch file, got one that cannot be read "
                         f"({type(error).__name__})") from None
    for wrapping in _WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapping), Mapping):
            content = content[wrapping]
    named = isinstance(content, Mapping) and bool(content) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    )
    if not named:
        raise InputError(f"`{path}` must hold weights only (tensors by name), got {type(content).__name__}")
    prefix = "module." if all(key.startswith("module.") for key in content) else ""
    return {key.removeprefix(prefix): value for key, value in content.items()}


def write_safetensors(path: Path, state: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Through a file beside it, so that a crash leaves the old one; equal contents are equal bytes."""
    serialized = serialize(state, metadata)
    size = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + size])
    # The library writes metadata in the random order of a hash table.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.write(memoryview(serialized)[8 + size :])
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
