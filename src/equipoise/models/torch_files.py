"""Files of torch that hold weights; nothing in them is executed, and other files are one
sentence."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from equipoise.core import files
from equipoise.core.checks import InputError

STATE_DICT_KEYS = (
    "state_dict",
    "model",
    "model_state_dict",
)  # under which files hold their weights
PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
)  # before all names: of DataParallel, torch.compile, a Lightning module
_ONLY_WEIGHTS, _ANYTHING = (
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
)  # torch's own names


def require_file(path: Path, kind: str = "file of a model") -> None:
    """Raise an :class:`InputError` unless the path is a file, and not a web page in place of a
    failed download."""
    if not files.exists(path) or not path.is_file():
        folder = files.exists(path) and path.is_dir()
        ending = ", got a folder" if folder else f" that exists{files.near_miss(path)}"
        raise InputError(f"`{path}` must be a file{ending}")
    with path.open("rb") as file:
        start = file.read(512).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise InputError(f"`{path}` must be a {kind}, got a web page: its download has failed")


def is_torchscript(path: Path) -> bool:
    """Whether a file holds a program of TorchScript beside its weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def is_torch_file(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a file is one of torch by its first bytes (an archive or a pickle), or else by its
    suffix."""
    start = b""
    if files.exists(path) and path.is_file():
        with path.open("rb") as file:
            start = file.read(9)
    if (
        path.suffix == ".safetensors" or start[4:] == b"\0\0\0\0{"
    ):  # the length of a header, and its begin
        return False
    return start.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in suffixes


def read_state_dict(path: Path, nested: Iterable[str] = STATE_DICT_KEYS) -> dict[str, Tensor]:
    """The state dict of a torch file, also one that lies under `nested` keys; nothing in the file
    is executed."""
    require_file(path)
    if is_torchscript(path):
        raise InputError(
            f"`{path}` must hold weights only, got a program (TorchScript); exported:{path.name} runs it"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch warns about old pickles; the errors below are clearer
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(
            r"(?:GLOBAL|Unsupported (?:global|class):?) (?!GLOBAL)([\w.]+)", str(error)
        )
        content = "other content" if named is None else named[1]
        raise InputError(
            f"`{path}` must hold weights only, got {content}, of which nothing was executed"
        ) from None
    except Exception as error:  # a damaged file can raise any error
        raise InputError(
            f"`{path}` must be a whole torch file, got one that cannot be read "
            f"({type(error).__name__})"
        ) from None
    for key in nested:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
        )
    ):
        raise InputError(
            f"`{path}` must hold weights only (tensors by name), got {type(content).__name__}"
        )
    unusual = [key for key, value in content.items() if not _is_dense(value)]
    if unusual:
        raise InputError(
            f"`{path}` must hold dense tensors with all their values, got sparse, meta, nested, quantized "
            f"or expanded ones: {abbreviate(unusual)}"
        )
    names = list(content)
    while prefix := next(
        (prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in names)), ""
    ):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, content.values(), strict=True))


def holds_weights(path: Path) -> bool:
    """Whether a torch file holds a state dict."""
    try:
        return bool(read_state_dict(path))
    except InputError:
        return False


def _is_dense(value: Tensor) -> bool:
    """Whether every number of a tensor is stored; a small file could expand one number to any
    size."""
    if value.layout != torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


@contextmanager
def only_weights() -> Iterator[None]:
    """Inside, torch unpickles only weights, also where it, another package or the user would trust
    a file."""
    before = {name: os.environ.pop(name, None) for name in (_ONLY_WEIGHTS, _ANYTHING)}
    os.environ[_ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        del os.environ[_ONLY_WEIGHTS]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def abbreviate(keys: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    names = list(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
