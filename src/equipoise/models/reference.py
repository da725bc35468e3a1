"""Model references: one string that names a model.

`file:PATH` is a checkpoint, `zoo:NAME` an architecture with random weights, `python:MODULE:FACTORY` a function without
arguments that returns a module from images in [0, 1] to logits, and `tta:N:REFERENCE` any of them with test-time
augmentation over N copies of each image (2, 6 or 10); `looks:` is an old name of `tta:`. `smoothed:SIGMA:REFERENCE` is
a randomly smoothed classifier with fixed Gaussian noise, `smoothed:SIGMA,N:REFERENCE` one with N samples instead of
100, `smoothed:SIGMA,N,fresh:REFERENCE` one with new noise in every pass. A bare path is `file:`.

What the user types is the user's own. A reference that a folder names may come from anybody: it must not run code
unless `allow_code` is set, and its modules are never taken from that folder (SECURITY.md).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.core.settings import Settings, setting
from equipoise.models import checkpoint, zoo
from equipoise.models.inspection import one_line
from equipoise.models.preprocessing import SHIFTS, TTAClassifier
from equipoise.models.smoothed import MAX_SAMPLES, SAMPLES, RandomlySmoothedClassifier

MAX_CHANNELS = 1000
ALIASES = {"looks": "tta"}  # old names of schemes
DATA_SCHEMES = ("file", "zoo")  # read weights or build architectures; any other scheme may run what its body names


@dataclass(frozen=True)
class Reference:
    """A parsed reference: `scheme`:`body`; `text` is what the user wrote.

    `folder` is the folder that names the reference, None if the user gave it.
    """

    scheme: str
    body: str
    text: str
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Settings):
    """How to load a model beside its reference; an option that a scheme cannot use is an error.

    `mean` and `std` may be text such as "0.49,0.48,0.45". `num_classes` and `image_shape` are required for `zoo:`; a
    checkpoint must agree with them. `seed` is for the random weights of `zoo:` and the noise of `smoothed:`.
    """

    arch: str | None = setting(None, "Architecture of .pt and .pth files.")
    mean: str | Sequence[float] | None = setting(None, "Per-channel means subtracted by the model of a .pt file, "
                                                       "e.g. 0.49,0.48,0.45.")
    std: str | Sequence[float] | None = setting(None, "Per-channel standard deviations that it divides by.")
    allow_code: bool = setting(False, "Run the code that a mixture folder names, such as python:MODULE:FACTORY; only "
                                      "for folders whose author you trust.")
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = None if value is None else tuple(checks.fractions(name, value, most=MAX_CHANNELS))
            if not isinstance(value, list | tuple):
                object.__setattr__(self, name, numbers)

        shape = self.image_shape
        valid = shape is None or (isinstance(shape, tuple | list) and len(shape) == 3
                                  and all(type(side) is int and side >= 1 for side in shape))
        checks.require(valid, "image_shape", "be (C, H, W)", shape)

    def refuse(self, reference: Reference, *names: str) -> None:
        """Raise an error if one of these options is given."""
        for name in names:
            value = getattr(self, name)
            checks.require(value is None, name, f"be left out for {reference.text}, which has its own", value)


def _load_file(reference: Reference, options: LoadOptions) -> nn.Module:
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("mean", "std", "num_classes", "image_shape")}
    return checkpoint.load(reference.body, options.arch, **settings)


def _load_zoo(reference: Reference, options: LoadOptions) -> nn.Module:
    options.refuse(reference, "arch")
    checks.one_of("model", reference.body, zoo.ARCHITECTURES)
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("num_classes", "image_shape", "mean", "std")}
    for name in ("num_classes", "image_shape"):
        checks.require(settings[name] is not None, name, f"be given for {reference.text}", None)
    return zoo.build(reference.body, seed=options.seed, **settings)


def _load_python(reference: Reference, options: LoadOptions) -> nn.Module:
    options.refuse(reference, "arch", "mean", "std")
    source, _, name = reference.body.partition(":")
    checks.require(bool(source and name), "model", "read python:MODULE:FACTORY", reference.text)
    with _importable_modules(reference.folder):
        try:
            factory = getattr(importlib.import_module(source), name, None)
        except (Exception, SystemExit) as error:  # the module is the user's own and may raise anything
            raise InputError(f"`model` must name a module that can be imported, got {source!r}, which raised "
                             f"{one_line(error)}") from error
        if not callable(factory):
            raise InputError(f"`model` must name a function of {source}, got {name!r}, which is not one")
        try:
            model = factory()
        except (Exception, SystemExit) as error:
            raise InputError(f"`model` must name a function that works without arguments, got "
                             f"{reference.text!r}, which raised {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"`model` must name a function that returns a torch module, got {reference.text!r}, "
                         f"which returned {type(model).__name__}")
    return model


def _load_tta(reference: Reference, options: LoadOptions) -> nn.Module:
    count, inner = _split(reference)
    return TTAClassifier(_load(inner, options), int(count))


def _load_smoothed(reference: Reference, options: LoadOptions) -> nn.Module:
    settings, inner = _split(reference)
    sigma, samples, fresh = *settings.split(","), *("", "")[settings.count(",") :]
    return RandomlySmoothedClassifier(
        _load(inner, options), checks.positive("sigma", checks.fraction("sigma", sigma)),
        checks.whole("samples", int(samples or SAMPLES), least=1, most=MAX_SAMPLES), seed=options.seed,
        fresh=bool(fresh))


# Schemes around another reference, scheme:SETTINGS:REFERENCE: what the settings look like, as a pattern and in words.
WRAPPERS = {
    "tta": ("|".join(map(str, SHIFTS)), f"tta:N:REFERENCE with N among {', '.join(map(str, SHIFTS))}"),
    "smoothed": (r"[0-9][^,]{0,30}(,[0-9]{1,9}(,fresh)?)?", "smoothed:SIGMA:REFERENCE, smoothed:SIGMA,N:REFERENCE or "
                 "smoothed:SIGMA,N,fresh:REFERENCE"),
}


def _split(reference: Reference) -> tuple[str, Reference]:
    """The settings of a wrapper, and the reference of the model inside."""
    pattern, words = WRAPPERS[reference.scheme]
    settings, _, body = reference.body.partition(":")
    checks.require(bool(body and re.fullmatch(pattern, settings, re.ASCII)), "model", f"read {words}", reference.text)
    inner = innermost = parse(body, reference.folder)
    while innermost.scheme in WRAPPERS:
        checks.require(innermost.scheme != reference.scheme, "model", f"have {reference.scheme}: only once",
                       reference.text)
        innermost = _split(innermost)[1]
    return settings, inner


Loader = Callable[[Reference, LoadOptions], nn.Module]
SCHEMES: Registry[Loader] = Registry("equipoise.model_schemes", "scheme of a model", {
    "file": _load_file, "python": _load_python, "smoothed": _load_smoothed, "tta": _load_tta,
    "zoo": _load_zoo})


def parse(text: str, folder: Path | None = None) -> Reference:
    """Parse a reference; `folder` is the folder that names it, None if the user gave it.

    >>> parse("zoo:resnet8")
    Reference(scheme='zoo', body='resnet8', text='zoo:resnet8', folder=None)
    >>> parse("best.safetensors").scheme
    'file'
    """
    scheme, _, body = text.partition(":")
    scheme = ALIASES.get(scheme, scheme)
    if scheme in SCHEMES and body:
        return Reference(scheme, body, text, folder)
    path = Path(text)
    if text and (path.suffix in (".safetensors", *checkpoint.TORCH_SUFFIXES) or path.exists()):
        return Reference("file", text, text, folder)
    known = ", ".join(f"{name}:" for name in sorted(SCHEMES))
    hint = f" (did you mean 'zoo:{text}'?)" if text in zoo.ARCHITECTURES else ""
    raise InputError(f"`model` must be a path that exists or begin with one of {known}, got {text!r}{hint}")


def relocate(text: str, move: Callable[[str], str]) -> str:
    """The reference with the path of its file, if it has one, changed by `move`.

    >>> relocate("tta:2:file:a.safetensors", "/models/{}".format)
    'tta:2:file:/models/a.safetensors'
    """
    reference = parse(text)
    if reference.scheme in WRAPPERS:
        settings, inner = _split(reference)
        return f"{reference.scheme}:{settings}:{relocate(inner.text, move)}"
    return f"file:{move(reference.body)}" if reference.scheme == "file" else text


def runs_code(text: str) -> bool:
    """Whether loading a reference may run code that it names.

    >>> runs_code("tta:2:python:module:factory"), runs_code("tta:2:zoo:resnet8")
    (True, False)
    """
    reference = parse(text)
    if reference.scheme in WRAPPERS:
        return runs_code(_split(reference)[1].text)
    return reference.scheme not in DATA_SCHEMES


def load(reference: str, options: LoadOptions | None = None, *, folder: Path | None = None,
         **settings: Any) -> nn.Module:
    """Load the model of a reference, in evaluation mode.

    Args:
        reference: of any of :data:`SCHEMES`.
        folder: the folder that names the reference, which then runs code only with `allow_code`; None if the user
            gave it.
        options, settings: fields of :class:`LoadOptions`.
    """
    for name in settings:
        checks.one_of("option", name, LoadOptions.names())
    model = _load(parse(reference, folder), dataclasses.replace(options or LoadOptions(), **settings)).eval()
    remember_reference(model, reference)
    return model


def _load(reference: Reference, options: LoadOptions) -> nn.Module:
    """Load the model, also that inside another reference; the one place where code in folders is refused."""
    if reference.folder is not None and runs_code(reference.text) and not options.allow_code:
        raise InputError(f"`allow_code` must be set (--allow-code) to load {reference.text!r}, which runs code and was "
                         f"named by the folder {reference.folder}, got False")
    return SCHEMES[reference.scheme](reference, options)


_references: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember_reference(model: nn.Module, reference: str) -> None:
    """Record from which reference a model was loaded."""
    _references[model] = reference


def reference_of(model: nn.Module) -> str | None:
    """The reference that a model was loaded from; None if it was not loaded by this package."""
    return _references.get(model)


@contextmanager
def _importable_modules(excluded: Path | None) -> Iterator[None]:
    """Put the current directory first on the import path, as `python -m` does; nothing is imported from `excluded`.

    What the imported modules add to the import path stays there.
    """
    guard = _FolderImportGuard(excluded)
    before, here = list(sys.path), str(Path.cwd())
    path = [entry for entry in (here, *before) if not guard.covers(entry or here)]
    sys.path[:] = path
    sys.meta_path.insert(0, guard)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
        sys.path[:] = [*(entry for entry in sys.path if entry not in path), *before]


class _FolderImportGuard(MetaPathFinder):
    """Refuses modules that lie inside a folder, also as packages of a folder that contains it; it finds none itself."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else folder.resolve()

    def covers(self, path: str) -> bool:
        return self.folder is not None and Path(path).resolve().is_relative_to(self.folder)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        spec = None if self.folder is None else PathFinder.find_spec(name, path, target)
        places = [] if spec is None else [*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())]
        if any(map(self.covers, places)):
            raise ModuleNotFoundError(f"No module named {name!r} outside of {self.folder}", name=name)
