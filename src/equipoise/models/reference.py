"""Model references: one string that says where a model comes from.

`file:PATH` is a checkpoint, `zoo:NAME` an architecture with fresh weights, `python:MODULE:FACTORY` a
function without arguments that returns a module from images in [0, 1] to logits, `looks:N:REFERENCE` any of
them looking at each image N times (2, 6 or 10), mirrored and moved. A bare path is `file:`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint, zoo
from equipoise.models.tta import SHIFTS, TTAClassifier


@dataclass(frozen=True)
class Reference:
    """A reference taken apart: `scheme`:`rest`; `text` is what the user wrote."""

    scheme: str
    rest: str
    text: str


@dataclass(frozen=True)
class LoadOptions:
    """What the caller says about a model beside its reference; every scheme refuses what it cannot honour."""

    arch: str | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    seed: int = 0

    def refuse(self, reference: Reference, *names: str) -> None:
        """Raise if one of these was said, rather than ignore it."""
        for name in names:
            said = getattr(self, name)
            checks.require(said is None, name, f"be left out for {reference.text}, which has its own", said)


def _file(reference: Reference, wishes: LoadOptions) -> nn.Module:
    return checkpoint.load(
        reference.rest, wishes.arch, num_classes=wishes.num_classes, image_shape=wishes.image_shape,
        mean=wishes.mean, std=wishes.std,
    )


def _zoo(reference: Reference, wishes: LoadOptions) -> nn.Module:
    wishes.refuse(reference, "arch")
    checks.one_of("model", reference.rest, zoo.ARCHITECTURES)
    if wishes.num_classes is None or wishes.image_shape is None:
        missing = "num_classes" if wishes.num_classes is None else "image_shape"
        raise InputError(f"`{missing}` must be given for {reference.text}, got None")
    return zoo.build(
        reference.rest, num_classes=wishes.num_classes, image_shape=wishes.image_shape, mean=wishes.mean,
        std=wishes.std, seed=wishes.seed,
    )


def _python(reference: Reference, wishes: LoadOptions) -> nn.Module:
    wishes.refuse(reference, "arch", "mean", "std")
    source, _, name = reference.rest.partition(":")
    checks.require(bool(source and name), "model", "read python:MODULE:FACTORY", reference.text)
    with _here_importable():
        try:
            factory = getattr(importlib.import_module(source), name, None)
        except Exception as error:  # the module is the user's: whatever it raises is for the user to read
            raise InputError(f"`model` must name a module that can be imported, got {source!r}, which raised "
                             f"{_told(error)}") from error
        if not callable(factory):
            raise InputError(f"`model` must name a function of {source}, got {name!r}, which is not one")
        try:
            model = factory()
        except Exception as error:
            raise InputError(f"`model` must name a function that works without arguments, got "
                             f"{reference.text!r}, which raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"`model` must name a function that returns a torch module, got {reference.text!r}, "
                         f"which returned {type(model).__name__}")
    return model


def _looks(reference: Reference, wishes: LoadOptions) -> nn.Module:
    count, inner = _counted(reference)
    checks.require(inner.scheme != "looks", "model", "say looks: once", reference.text)
    return TTAClassifier(SCHEMES[inner.scheme](inner, wishes), count)


def _counted(reference: Reference) -> tuple[int, Reference]:
    """How many looks, and what looks."""
    count, _, rest = reference.rest.partition(":")
    known = [str(number) for number in SHIFTS]
    checks.require(count in known and bool(rest), "model", f"read looks:N:REFERENCE with N among {', '.join(known)}",
                   reference.text)
    return int(count), parse(rest)


Loader = Callable[[Reference, LoadOptions], nn.Module]
SCHEMES: dict[str, Loader] = {"file": _file, "looks": _looks, "python": _python, "zoo": _zoo}


def parse(text: str) -> Reference:
    """Take a reference apart.

    >>> parse("zoo:resnet8")
    Reference(scheme='zoo', rest='resnet8', text='zoo:resnet8')
    >>> parse("best.safetensors").scheme
    'file'
    """
    scheme, _, rest = text.partition(":")
    if scheme in SCHEMES and rest:
        return Reference(scheme, rest, text)
    path = Path(text)
    if text and (path.suffix in (".safetensors", *checkpoint.TORCH_SUFFIXES) or path.exists()):
        return Reference("file", text, text)
    known = ", ".join(f"{name}:" for name in sorted(SCHEMES))
    hint = f" (did you mean 'zoo:{text}'?)" if text in zoo.ARCHITECTURES else ""
    raise InputError(f"`model` must be a path that exists or begin with one of {known}, got {text!r}{hint}")


def placed(text: str, place: Callable[[str], str]) -> str:
    """A reference whose file, if it names one, lies elsewhere.

    >>> placed("looks:2:file:a.safetensors", "/models/{}".format)
    'looks:2:file:/models/a.safetensors'
    """
    reference = parse(text)
    if reference.scheme == "looks":
        count, inner = _counted(reference)
        return f"looks:{count}:{placed(inner.text, place)}"
    return f"file:{place(reference.rest)}" if reference.scheme == "file" else text


def load(
    reference: str, *, arch: str | None = None, mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None, num_classes: int | None = None,
    image_shape: tuple[int, int, int] | None = None, seed: int = 0,
) -> nn.Module:
    """The module of a reference, in evaluation mode.

    Args:
        reference: as `parse` reads it.
        arch, mean, std: for a state dict of torch, which does not say them.
        num_classes, image_shape: for `zoo:`; what a checkpoint says must agree with them.
        seed: of the fresh weights of `zoo:`.
    """
    taken_apart = parse(reference)
    wishes = LoadOptions(arch, mean, std, num_classes, image_shape, seed)
    return SCHEMES[taken_apart.scheme](taken_apart, wishes).eval()


def digest(reference: str, module: nn.Module) -> str:
    """SHA-256 of the checkpoint file for `file:`, of the weights of the loaded module for the rest."""
    taken_apart = parse(reference)
    if taken_apart.scheme == "file":
        return checkpoint.digest(taken_apart.rest)
    return checkpoint.weights_digest(module)


def _told(error: Exception) -> str:
    """An error of the user's own code on one line; the whole of it stays the cause."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _here_importable() -> Iterator[None]:
    """The current directory first on the import path, as with `python -m`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
