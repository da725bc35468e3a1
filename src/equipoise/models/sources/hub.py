"""Files of published models: the caches of Hugging Face and torch, downloads, hashes, and packages
that are optional.

A cache is read without the package that wrote it, so that a machine without a network needs nothing
else. Files in the cache of Hugging Face are named by their SHA-256, those of torch end with its
first digits; both are checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint
from equipoise.models.inspection import one_line
from equipoise.models.options import expand_home
from equipoise.models.torch_files import require_file

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_REPOSITORY = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?(?:@[\w./-]{1,255})?", re.ASCII)


@dataclass(frozen=True)
class WeightFile:
    """A local file of a published model, and how far it was checked."""

    path: Path
    is_checked: bool = False

    def __str__(self) -> str:
        return f"{self.path}{' (SHA-256 checked)' if self.is_checked else ''}"

    def read(self) -> dict[str, Tensor]:
        """The weights by name; nothing in the file is executed."""
        return checkpoint.read_weights(self.path)


def require_package(name: str, scheme: str) -> Any:
    """Import an optional package that a scheme needs."""
    try:
        return import_module(name)
    except (
        Exception
    ) as error:  # a package that does not fit to this torch raises other errors than ImportError
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"; pip install {missing.partition('.')[0]}" if missing else ""
        raise InputError(
            f"`{scheme}:` models need the package {name}, which cannot be imported: {one_line(error)}"
            f"{hint}"
        ) from error


def is_offline() -> bool:
    """Whether the user forbids downloads, in the words of Hugging Face."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


_folder: ContextVar[Path | None] = ContextVar(
    "folder", default=None
)  # which names the model that is being loaded


@contextmanager
def no_downloads_for(folder: Path | None) -> Iterator[None]:
    """Inside, nothing is downloaded because of this folder, which may come from anybody; None
    forbids nothing."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def why_no_download() -> str | None:
    """Why nothing may be downloaded, in words; None if it may."""
    if is_offline():
        return "HF_HUB_OFFLINE is set"
    folder = _folder.get()
    return (
        None
        if folder is None
        else f"nothing is downloaded for the folder {folder} without --allow-code"
    )


@contextmanager
def offline() -> Iterator[None]:
    """Inside, huggingface_hub and what uses it reach no server, also if it was imported before."""
    before = os.environ.get("HF_HUB_OFFLINE")
    constants = sys.modules.get("huggingface_hub.constants")
    constant = getattr(constants, "HF_HUB_OFFLINE", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if constants is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.environ.pop("HF_HUB_OFFLINE")
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before
        constants = sys.modules.get("huggingface_hub.constants")
        if constants is not None:  # first imported inside, it has read the variable
            constants.HF_HUB_OFFLINE = is_offline() if constant is None else constant  # type: ignore[attr-defined]


def cache_folder() -> Path:
    """Where Hugging Face caches repositories."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def find_file(repository: str, names: Sequence[str]) -> WeightFile:
    """The first of these files of a repository `ORGANISATION/NAME[@REVISION]`, from the cache or
    else downloaded."""
    checks.require(
        bool(_REPOSITORY.fullmatch(repository)) and ".." not in repository,
        "model",
        "name a repository like ORGANISATION/NAME",
        repository,
    )
    name, _, revision = repository.partition("@")
    problem = f"has none in {cache_folder()}"
    snapshot = _snapshot(name, revision or "main")
    for file in names:
        if snapshot is not None and (snapshot / file).is_file():
            return check_blob(snapshot / file)
    if Path(name).is_dir():
        raise InputError(
            f"`{repository}` must be a repository in {cache_folder()}, or not the name of a folder: the "
            f"folder is hf:./{name}"
        )
    if reason := why_no_download():
        problem += f", and {reason}"
    else:
        path, reason = _download(name, names, revision or None)
        if path is not None:
            return check_blob(path)
        problem += f", and {reason}"
    raise InputError(
        f"`{repository}` must be a repository with {' or '.join(names)}, but it {problem}"
    )


def _snapshot(name: str, revision: str) -> Path | None:
    """The folder of a revision in the cache."""
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    pointer = repository / "refs" / revision
    commit = (
        pointer.read_text(encoding="ascii", errors="replace").strip()
        if pointer.is_file()
        else revision
    )
    known = re.fullmatch(r"[0-9a-f]{4,64}", commit) is not None
    return (
        repository / "snapshots" / commit
        if known and (repository / "snapshots" / commit).is_dir()
        else None
    )


def _download(name: str, files: Sequence[str], revision: str | None) -> tuple[Path | None, str]:
    """The first file that the repository has, by the package huggingface_hub, or why there is
    none."""
    try:
        package = import_module("huggingface_hub")
    except ImportError:
        return None, "the package huggingface_hub, which downloads, is not installed"
    reason = ""
    for file in files:
        try:
            return Path(package.hf_hub_download(name, file, revision=revision)), ""
        except Exception as error:  # no such file or repository, no network, no permission
            reason = one_line(error)
    return None, f"its download failed: {checks.shorten(reason, 160)}"


def check_blob(path: Path) -> WeightFile:
    """Compare a file of the cache with the SHA-256 that its blob is named by; small files have
    other names."""
    require_file(path)
    blob = path.resolve()
    if blob.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{64}", blob.name):
        return WeightFile(path)
    return _compare(path, blob.name)


def check_name(path: Path) -> WeightFile:
    """Compare a file with the first digits of its SHA-256, if its name ends with them, as torch's
    downloads do."""
    require_file(path)
    digits = _hash_in(path.name)
    return WeightFile(path) if digits is None else _compare(path, digits)


def _hash_in(name: str) -> str | None:
    match = re.search(r"-([0-9a-f]{8,64})\.", name)
    return None if match is None else match[1]


def _compare(path: Path, expected: str) -> WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(expected):
        raise InputError(
            f"`{path}` must have the published SHA-256 {expected[:12]}…, got {digest[:12]}…: delete it "
            "and download it again"
        )
    return WeightFile(path, is_checked=True)


def local_file(text: str) -> WeightFile:
    """The file that a setting `weights` names; digits in the user's own names are no hash."""
    path = Path(expand_home(text))
    require_file(path)
    return WeightFile(path)


def torch_file(url: str) -> WeightFile:
    """The file of a URL in the cache of torch (TORCH_HOME), downloaded if it is not there."""
    import torch

    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.exists():
        if reason := why_no_download():
            raise InputError(f"`{path}` must be there, because {reason}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), _hash_in(path.name), progress=False)
        except Exception as error:  # no network, another hash
            raise InputError(
                f"`{path}` must be there, because its download failed: {one_line(error)}"
            ) from None
    return check_name(path)
