"""Models from Python code: `python:FILE.py:NAME` or `python:MODULE:NAME`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn

from equipoise.core import checks, files
from equipoise.core.checks import InputError
from equipoise.models.inspection import one_line
from equipoise.models.options import expand_home
from equipoise.models.outputs import unwrap_outputs

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference


def load(reference: Reference, options: LoadOptions) -> nn.Module:
    """The module that a name stands for: a function or a class called without arguments, or a
    module itself."""
    source, _, name = reference.body.rpartition(":")
    checks.require(
        bool(source and name),
        "model",
        "read python:FILE.py:NAME or python:MODULE:NAME",
        reference.text,
    )
    file = Path(expand_home(source)) if source.endswith(".py") else None
    with _importable_modules(
        reference.folder, Path.cwd() if file is None else file.resolve().parent
    ) as guard:
        try:
            module = importlib.import_module(source) if file is None else _import_file(file, guard)
        except (
            Exception,
            SystemExit,
        ) as error:  # the module is the user's own and may raise anything
            raise InputError(
                f"`model` must name a module that can be imported, got {source!r}, which raised "
                f"{one_line(error)}"
            ) from error
        attribute = getattr(module, name, None)
        if isinstance(attribute, nn.Module):
            return unwrap_outputs(attribute)
        if not callable(attribute):
            near = difflib.get_close_matches(
                name, [key for key, value in vars(module).items() if callable(value)], n=1
            )
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InputError(
                f"`model` must name a function, a class or a torch module of {source}, got {name!r}, "
                f"which is not one{hint}"
            )
        try:
            model = attribute()
        except (Exception, SystemExit) as error:
            raise InputError(
                f"`model` must name a function that works without arguments, got "
                f"{reference.text!r}, which raised {one_line(error)}"
            ) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"`model` must name a function that returns a torch module, got {reference.text!r}, "
            f"which returned {type(model).__name__}"
        )
    return unwrap_outputs(model)


def _import_file(path: Path, guard: _FolderImportGuard) -> ModuleType:
    """The module of a file, which is run once, as an imported module is."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}{files.near_miss(path)}")
    if guard.covers(str(path)):
        raise ModuleNotFoundError(f"No file {path.name} outside of {guard.folder}")
    name = f"file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "of a name that ends with .py"
        sys.modules[name] = importlib.util.module_from_spec(
            spec
        )  # dataclasses look their module up there
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@contextmanager
def _importable_modules(excluded: Path | None, first: Path) -> Iterator[_FolderImportGuard]:
    """Put a folder first on the import path: the current one, as `python -m` does, or that of the
    file, as `python FILE.py` does. Nothing is imported from `excluded`.

    What the imported modules add to the import path stays there.
    """
    guard = _FolderImportGuard(excluded)
    before, here = list(sys.path), str(Path.cwd())
    path = [entry for entry in (str(first), *before) if not guard.covers(entry or here)]
    sys.path[:] = path
    sys.meta_path.insert(0, guard)
    importlib.invalidate_caches()
    try:
        yield guard
    finally:
        sys.meta_path.remove(guard)
        sys.path[:] = [*(entry for entry in sys.path if entry not in path), *before]


class _FolderImportGuard(MetaPathFinder):
    """Refuses modules that lie inside a folder, also as packages of a folder that contains it; it
    finds none itself."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else folder.resolve()

    def covers(self, path: str) -> bool:
        return self.folder is not None and Path(path).resolve().is_relative_to(self.folder)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        spec = None if self.folder is None else PathFinder.find_spec(name, path, target)
        places = (
            []
            if spec is None
            else [*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())]
        )
        if any(map(self.covers, places)):
            raise ModuleNotFoundError(
                f"No module named {name!r} outside of {self.folder}", name=name
            )
