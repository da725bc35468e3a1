"""Model references: one string that names a model.

`file:PATH` is a checkpoint, `zoo:NAME` an architecture with random weights, `python:MODULE:FACTORY` a function without
arguments that returns a module from images in [0, 1] to logits, and `tta:N:REFERENCE` any of them with test-time
augmentation over N copies of each image (2, 6 or 10); `looks:` is an old name of `tta:`. A bare path is `file:`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.core.settings import Settings, setting
from equipoise.models import checkpoint, zoo
from equipoise.models.preprocessing import SHIFTS, TTAClassifier

ALIASES = {"looks": "tta"}  # old names of schemes


@dataclass(frozen=True)
class Reference:
    """A parsed reference: `scheme`:`body`; `text` is what the user wrote."""

    scheme: str
    body: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Settings):
    """How to load a model beside its reference; an option that a scheme cannot use is an error.

    `mean` and `std` may be text such as "0.49,0.48,0.45". `num_classes` and `image_shape` are required for `zoo:`; a
    checkpoint must agree with them. `seed` is for the random weights of `zoo:`.
    """

    arch: str | None = setting(None, "Architecture of .pt and .pth files.")
    mean: str | Sequence[float] | None = setting(None, "Per-channel means subtracted by the model of a .pt file, "
                                                       "e.g. 0.49,0.48,0.45.")
    std: str | Sequence[float] | None = setting(None, "Per-channel standard deviations that it divides by.")
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, tuple(checks.fraction(name, part) for part in value.split(",")))

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
    with _current_directory_importable():
        try:
            factory = getattr(importlib.import_module(source), name, None)
        except Exception as error:  # the module is the user's own and may raise anything
            raise InputError(f"`model` must name a module that can be imported, got {source!r}, which raised "
                             f"{_one_line(error)}") from error
        if not callable(factory):
            raise InputError(f"`model` must name a function of {source}, got {name!r}, which is not one")
        try:
            model = factory()
        except Exception as error:
            raise InputError(f"`model` must name a function that works without arguments, got "
                             f"{reference.text!r}, which raised {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"`model` must name a function that returns a torch module, got {reference.text!r}, "
                         f"which returned {type(model).__name__}")
    return model


def _load_tta(reference: Reference, options: LoadOptions) -> nn.Module:
    count, inner = _split_tta(reference)
    checks.require(inner.scheme != "tta", "model", "have tta: only once", reference.text)
    return TTAClassifier(SCHEMES[inner.scheme](inner, options), count)


def _split_tta(reference: Reference) -> tuple[int, Reference]:
    """The number of copies, and the reference of the model itself."""
    count, _, body = reference.body.partition(":")
    known = [str(number) for number in SHIFTS]
    checks.require(count in known and bool(body), "model", f"read tta:N:REFERENCE with N among {', '.join(known)}",
                   reference.text)
    return int(count), parse(body)


Loader = Callable[[Reference, LoadOptions], nn.Module]
SCHEMES: Registry[Loader] = Registry("equipoise.model_schemes", "scheme of a model", {
    "file": _load_file, "python": _load_python, "tta": _load_tta, "zoo": _load_zoo})


def parse(text: str) -> Reference:
    """Parse a reference.

    >>> parse("zoo:resnet8")
    Reference(scheme='zoo', body='resnet8', text='zoo:resnet8')
    >>> parse("best.safetensors").scheme
    'file'
    """
    scheme, _, body = text.partition(":")
    scheme = ALIASES.get(scheme, scheme)
    if scheme in SCHEMES and body:
        return Reference(scheme, body, text)
    path = Path(text)
    if text and (path.suffix in (".safetensors", *checkpoint.TORCH_SUFFIXES) or path.exists()):
        return Reference("file", text, text)
    known = ", ".join(f"{name}:" for name in sorted(SCHEMES))
    hint = f" (did you mean 'zoo:{text}'?)" if text in zoo.ARCHITECTURES else ""
    raise InputError(f"`model` must be a path that exists or begin with one of {known}, got {text!r}{hint}")


def relocate(text: str, move: Callable[[str], str]) -> str:
    """The reference with the path of its file, if it has one, changed by `move`.

    >>> relocate("tta:2:file:a.safetensors", "/models/{}".format)
    'tta:2:file:/models/a.safetensors'
    """
    reference = parse(text)
    if reference.scheme == "tta":
        count, inner = _split_tta(reference)
        return f"tta:{count}:{relocate(inner.text, move)}"
    return f"file:{move(reference.body)}" if reference.scheme == "file" else text


def load(reference: str, options: LoadOptions | None = None, **settings: Any) -> nn.Module:
    """Load the model of a reference, in evaluation mode; `settings` are fields of :class:`LoadOptions`."""
    for name in settings:
        checks.one_of("option", name, LoadOptions.names())
    parsed = parse(reference)
    model = SCHEMES[parsed.scheme](parsed, dataclasses.replace(options or LoadOptions(), **settings)).eval()
    remember_reference(model, reference)
    return model


_references: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember_reference(model: nn.Module, reference: str) -> None:
    """Record from which reference a model was loaded."""
    _references[model] = reference


def reference_of(model: nn.Module) -> str | None:
    """The reference that a model was loaded from; None if it was not loaded by this package."""
    return _references.get(model)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Put the current directory first on the import path, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
