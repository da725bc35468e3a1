"""Model references: one string that names a model, `scheme:body?key=value&…`.

`file:PATH` is a checkpoint, `zoo:NAME` an architecture with random weights, `python:FILE.py:NAME`
and `python:MODULE:NAME` a function without arguments, a class or a module from images in [0, 1] to
logits; docs/models.md has the others. `tta:N:REFERENCE` is any of them with test-time augmentation
over N copies of each image (2, 6 or 10).
`smoothed:SIGMA:REFERENCE` is a randomly smoothed classifier with fixed Gaussian noise,
`smoothed:SIGMA,N:REFERENCE` one with N samples instead of 100, `smoothed:SIGMA,N,fresh:REFERENCE`
one with new noise in every pass. A bare path is `file:`. Settings (:class:`ModelSettings`) belong
to the innermost reference; a literal `?` is written `%3F`.

What the user types is the user's own. A reference that a folder names may come from anybody: it
must not run code unless `allow_code` is set, and its modules are never taken from that folder
(SECURITY.md).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.core import checks, files
from equipoise.core.checks import InputError
from equipoise.core.modes import outside_inference_mode
from equipoise.core.registry import Registry
from equipoise.models import checkpoint
from equipoise.models.architectures import zoo
from equipoise.models.assembly import assemble
from equipoise.models.layers import resizing
from equipoise.models.loaded import (
    LoadedModel,
    describe_module,
    info_of,
    remember_info,
    remember_reference,
)
from equipoise.models.options import (
    DATA_OPTIONS,
    EXPLICIT_PATH,
    LoadOptions,
    ModelSettings,
    escape,
    expand_home,
    unescape,
)
from equipoise.models.sources import hub
from equipoise.models.sources.wrappers import WRAPPERS

COMMON = ("preset", "labels")  # settings that every scheme takes
NO_SETTINGS = ModelSettings()


@dataclass(frozen=True)
class Reference:
    """A parsed reference: `scheme`:`body`?`settings`; `text` is what the user wrote.

    `folder` is the folder that names the reference, None if the user gave it. Settings of a wrapper
    such as `tta:` are those of the model inside.
    """

    scheme: str
    body: str
    text: str
    folder: Path | None = None
    settings: ModelSettings = NO_SETTINGS

    def __str__(self) -> str:
        """The reference with all its settings; :func:`parse` reads it."""
        query = self.settings.query()
        return f"{self.scheme}:{escape(self.body)}{'?' if query else ''}{query}"


Loader = Callable[[Reference, LoadOptions], nn.Module | LoadedModel]


@dataclass(frozen=True)
class Scheme:
    """A scheme of this package; its loader is a function `load(reference, options)`, imported when
    first called.

    The options of that call are the user's, overridden by the settings of the reference.

    Args:
        loader: as "module:function", of this package.
        settings: that a reference may have beside :data:`COMMON`.
        runs_code: whether loading may run code that the body names; False only if it reads data.
        path: the pattern of a body that begins with a path, with the path as its first group.
        takes_defaults: whether options that the user gave for all models apply to this body.
        find_weights: where the file of a body and a setting `weights` lies that depends on the
            current folder or the environment, as "module:function"; it is recorded as `weights`.
    """

    loader: str
    settings: tuple[str, ...] = ()
    runs_code: bool = True
    path: str | None = None
    takes_defaults: Callable[[str], bool] = lambda body: False
    find_weights: str | None = None

    def __call__(self, reference: Reference, options: LoadOptions) -> nn.Module | LoadedModel:
        """Load the model of a reference."""
        loaded: nn.Module | LoadedModel = _function(self.loader)(reference, options)
        return loaded


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"equipoise.models.{module}"), attribute)
    return function


_OWN_SETTINGS = ("arch", "mean", "std", "num_classes", "image_shape")
SCHEMES: Registry[Loader] = Registry(
    "equipoise.model_schemes",
    "scheme of a model",
    {
        "exported": Scheme("sources.exported:load", ("mean", "std"), path="(.*)"),
        "file": Scheme(
            "checkpoint:load_reference",
            _OWN_SETTINGS,
            False,
            "(.*)",
            lambda body: Path(body).suffix in checkpoint.TORCH_SUFFIXES,
        ),
        "hf": Scheme("sources.hf_models:load", _OWN_SETTINGS, False, EXPLICIT_PATH),
        "http": Scheme("sources.remote:load_reference", ("mean", "std", "num_classes")),
        "https": Scheme("sources.remote:load_reference", ("mean", "std", "num_classes")),
        "onnx": Scheme(
            "sources.onnx_model:load_reference", ("mean", "std", "num_classes"), False, "(.*)"
        ),
        "python": Scheme("sources.python_code:load", path=r"(.*\.py):[^:]*"),
        "robustbench": Scheme(
            "sources.robustbench:load_reference",
            ("weights",),
            False,
            find_weights="sources.robustbench:find_weights",
        ),
        "smoothed": Scheme(""),  # wrappers, see below
        "timm": Scheme(
            "sources.timm_models:load", ("mean", "std", "num_classes", "weights"), False
        ),
        "torchvision": Scheme(
            "sources.torchvision_models:load", ("mean", "std", "num_classes", "weights"), False
        ),
        "tta": Scheme(""),
        "zoo": Scheme(
            "architectures.zoo:load_reference",
            ("mean", "std", "num_classes", "image_shape", "seed"),
            False,
            takes_defaults=lambda body: True,
        ),
    },
)


def split_wrapper(reference: Reference) -> tuple[str, Reference]:
    """The settings of a wrapper itself, and the reference of the model inside."""
    wrapper = WRAPPERS[reference.scheme]
    own, _, body = reference.body.partition(":")
    checks.require(
        bool(body and re.fullmatch(wrapper.pattern, own, re.ASCII)),
        "model",
        f"read {wrapper.words}",
        reference.text,
    )
    return own, dataclasses.replace(
        parse(escape(body), reference.folder), settings=reference.settings
    )


def _steps(reference: Reference) -> list[Reference]:
    """The reference and those inside it, no wrapper twice; the last one is the model itself."""
    steps = [reference]
    while steps[-1].scheme in WRAPPERS:
        _, inner = split_wrapper(steps[-1])
        checks.require(
            inner.scheme not in [step.scheme for step in steps],
            "model",
            f"have {inner.scheme}: only once",
            reference.text,
        )
        steps.append(inner)
    return steps


def innermost(reference: Reference) -> Reference:
    """The reference of the model itself, inside of all wrappers."""
    return _steps(reference)[-1]


def parse(text: str, folder: Path | None = None) -> Reference:
    """Parse a reference; `folder` is the folder that names it, None if the user gave it.

    >>> parse("zoo:resnet8").body
    'resnet8'
    >>> parse("best.pt?arch=resnet20").settings.arch
    'resnet20'
    """
    address, question, query = text.partition("?")
    scheme, _, body = address.partition(":")
    if scheme not in SCHEMES or not body:
        if text and files.exists(text):  # whatever characters it has
            return Reference("file", text, text, folder)
        checks.require(scheme not in SCHEMES, "model", f"name a model after {scheme}:", text)
        scheme, body = "file", address
        path = Path(unescape(address))
        if not address or not (
            path.suffix in (".safetensors", *checkpoint.TORCH_SUFFIXES) or files.exists(path)
        ):
            known = ", ".join(f"{name}:" for name in sorted(SCHEMES))
            hint = (
                f" (did you mean 'zoo:{text}'?)"
                if text in zoo.ARCHITECTURES
                else files.near_miss(path)
            )
            raise InputError(
                f"`model` must be a path that exists or begin with one of {known}, got {text!r}{hint}"
            )
    settings = (
        ModelSettings.parse(query, checks.shorten(text, checks.VALUE_LENGTH))
        if question
        else NO_SETTINGS
    )
    return Reference(scheme, unescape(body), text, folder, settings)


def relocate(text: str, move: Callable[[str], str]) -> str:
    """The reference with the paths of its files, if it has any, changed by `move`.

    >>> relocate("tta:2:file:a.safetensors", "/models/{}".format)
    'tta:2:file:/models/a.safetensors'
    """
    return str(_relocate(parse(text), move))


def _relocate(reference: Reference, move: Callable[[str], str]) -> Reference:
    scheme, body, _ = _builtin(reference), reference.body, _steps(reference)  # which are checked
    if reference.scheme in WRAPPERS:
        own, inner = split_wrapper(reference)
        moved = _relocate(inner, move)
        return dataclasses.replace(
            reference, body=f"{own}:{moved.scheme}:{moved.body}", settings=moved.settings
        )
    pattern = None if scheme is None else scheme.path
    if pattern is not None and (match := re.fullmatch(pattern, body, re.DOTALL)):
        body = f"{body[: match.start(1)]}{move(expand_home(match[1]))}{body[match.end(1) :]}"
    return dataclasses.replace(reference, body=body, settings=reference.settings.relocate(move))


def runs_code(text: str | Reference) -> bool:
    """Whether loading a reference may run code that it names.

    >>> runs_code("tta:2:python:module:factory"), runs_code("tta:2:zoo:resnet8")
    (True, False)
    """
    scheme = _builtin(_steps(parse(text) if isinstance(text, str) else text)[-1])
    return scheme is None or scheme.runs_code


def _builtin(reference: Reference) -> Scheme | None:
    """The scheme, None if it is one of another package, which is not imported here and may run
    code."""
    scheme = SCHEMES.builtin.get(reference.scheme)
    return scheme if isinstance(scheme, Scheme) else None


@outside_inference_mode
def load(
    reference: str,
    options: LoadOptions | None = None,
    *,
    folder: Path | None = None,
    **settings: Any,
) -> nn.Module:
    """Load the model of a reference, in evaluation mode.

    Args:
        reference: of any of :data:`SCHEMES`.
        options: defaults for references without such settings; they apply to models that have no
            values of their own (`.pt` files and `zoo:`), and are ignored by others.
        folder: the folder that names the reference, which then runs code only with `allow_code`;
            None if the user gave it.
        settings: fields of :class:`LoadOptions` for this very model; one that its scheme cannot use
            is an error.
    """
    for name in settings:
        checks.one_of("option", name, LoadOptions.names())
    general = {
        name: settings.pop(name) for name in (*DATA_OPTIONS, "allow_code") if name in settings
    }
    options = dataclasses.replace(options or LoadOptions(), **general)
    parsed, own = parse(reference, folder), ModelSettings(**settings).given()
    for name, value in own.items():
        written = getattr(parsed.settings, name)
        checks.require(written in (None, value), name, f"be {written!r}, as in {reference}", value)
    own = {**parsed.settings.given(), **own}
    parsed = _with_defaults(dataclasses.replace(parsed, settings=ModelSettings(**own)), options)
    model = _load(parsed, options)
    remember_reference(model, reference, str(_with_weights(parsed)), parsed.settings)
    return model


def _with_weights(reference: Reference) -> Reference:
    """The reference of a loaded model, which finds the same file from everywhere."""
    model = _steps(reference)[-1]
    scheme = _builtin(model)
    if scheme is None or scheme.find_weights is None:
        return reference
    weights = _function(scheme.find_weights)(model.body, model.settings.weights)
    return dataclasses.replace(
        reference, settings=dataclasses.replace(reference.settings, weights=weights)
    )


def _with_defaults(reference: Reference, options: LoadOptions) -> Reference:
    """The reference with all settings that its model is loaded with."""
    innermost = _steps(reference)[-1]
    scheme, own = _builtin(innermost), reference.settings.given()
    if scheme is None:
        return reference
    for name, value in own.items():
        checks.require(
            name in (*scheme.settings, *COMMON),
            name,
            f"be left out for {innermost.scheme}: models, which have their own",
            value,
        )
    general = _for_network(options, reference.settings)
    defaults = {name: value for name, value in general.given().items() if name in scheme.settings}
    return dataclasses.replace(
        reference,
        settings=ModelSettings(
            **{**(defaults if scheme.takes_defaults(innermost.body) else {}), **own}
        ),
    )


def _for_network(options: LoadOptions, settings: ModelSettings) -> LoadOptions:
    """The options without what is known of the data but not of the network: it may have other
    classes and sizes."""
    return dataclasses.replace(
        options,
        num_classes=options.num_classes if settings.labels is None else None,
        image_shape=options.image_shape if settings.preset is None else None,
    )


def _load(reference: Reference, options: LoadOptions) -> nn.Module:
    """Load the model, also that inside another reference; the one place where code in folders is
    refused."""
    if reference.folder is not None and runs_code(reference) and not options.allow_code:
        raise InputError(
            f"`allow_code` must be set (--allow-code) to load {reference.text!r}, which runs code and was "
            f"named by the folder {reference.folder}, got False"
        )
    loader = SCHEMES[reference.scheme]
    if reference.scheme in WRAPPERS:
        own, inner = split_wrapper(reference)
        network = _load(inner, options)
        model = WRAPPERS[reference.scheme].wrap(network, own, options).eval()
        remember_info(model, info_of(network) or describe_module(network))
        return model
    if reference.settings.preset is not None:
        resizing.preset(reference.settings.preset)  # checks it, before anything is read
    general = _for_network(options, reference.settings)
    own_options = dict.fromkeys(ModelSettings.names()) | {
        name: getattr(general, name) for name in DATA_OPTIONS
    }
    with hub.no_downloads_for(None if options.allow_code else reference.folder):
        loaded = loader(
            reference, dataclasses.replace(options, **{**own_options, **reference.settings.given()})
        )
    model, info = assemble(loaded, reference.text, reference.settings, options)
    remember_info(model, info)
    return model.eval()
