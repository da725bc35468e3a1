"""What a reference loaded: the network, and where it, its preprocessing and its classes come
from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from equipoise.core import checks, progress
from equipoise.core.text import literal
from equipoise.models.layers.normalization import Normalized
from equipoise.models.layers.resizing import Preprocessing
from equipoise.models.options import DATA_OPTIONS, LoadOptions, ModelSettings


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a loaded model, said in one line.

    Args:
        architecture: its name, such as resnet18.
        num_classes: None if only a call would tell.
        input_shape: (C, H, W) that the network itself computes on.
        normalization: in words, with where it comes from.
        origin: where the weights come from, and whether a hash was checked.
        class_names: one per class.
        is_remote: whether every image costs a request.
        of_zoo: whether it is a model of this package's zoo, which holds its own normalisation: no
            line is shown.
    """

    architecture: str
    num_classes: int | None = None
    input_shape: tuple[int, int, int] | None = None
    normalization: str = "its own"
    origin: str | None = None
    class_names: tuple[str, ...] = ()
    is_remote: bool = False
    of_zoo: bool = False

    def __str__(self) -> str:
        parts = (
            self.architecture,
            "" if self.num_classes is None else f"{self.num_classes} classes",
            "" if self.input_shape is None else f"input {'×'.join(map(str, self.input_shape))}",
            f"normalisation: {self.normalization}",
            "" if self.origin is None else f"weights: {self.origin}",
        )
        return "; ".join(filter(None, parts))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What the loader of a scheme returns: a network, and the preprocessing that it was trained
    with.

    `preprocessing` becomes a first layer; None for a network that maps images in [0, 1] to logits
    on its own. The caller replaces its parts by the settings of the reference (`preset`, `mean`,
    `std`), and maps `labels`.
    """

    network: nn.Module
    info: ModelInfo
    preprocessing: Preprocessing | None = field(default=None, kw_only=True)


def describe_module(model: nn.Module) -> ModelInfo:
    """What a module shows of itself."""
    if not isinstance(model, Normalized) or not model.config:
        return ModelInfo(type(model).__name__)
    sizes = [int(size) for size in model.config["image_shape"].split(",")]
    mean, std = (
        ",".join(f"{number:g}" for number in values.flatten().tolist())
        for values in (model.mean, model.std)
    )
    return ModelInfo(
        model.config["arch"],
        int(model.config["num_classes"]),
        (sizes[0], sizes[1], sizes[2]),
        f"mean {mean}, std {std} (in the model)",
        of_zoo=True,
    )


_infos: WeakKeyDictionary[nn.Module, ModelInfo] = WeakKeyDictionary()


def remember_info(model: nn.Module, info: ModelInfo) -> None:
    """Record what is known of a loaded model."""
    _infos[model] = info


def info_of(model: nn.Module) -> ModelInfo | None:
    """What is known of a model that was loaded by this package: in one line as `str`, and its class
    names."""
    return _infos.get(model)


def note_loaded(models: Mapping[str, nn.Module]) -> None:
    """Show one line for every model that was loaded from elsewhere and of which more than its class
    is known."""
    for name, model in models.items():
        info = _infos.get(model)
        if info is not None and not info.of_zoo and info != ModelInfo(info.architecture):
            progress.note(literal(f"{name}: {info}"))


@dataclass(frozen=True)
class _Record:
    text: str  # the reference, as the user wrote it
    full: str  # with all settings
    settings: ModelSettings


_references: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()


def remember_reference(
    model: nn.Module, text: str, full: str | None = None, settings: ModelSettings | None = None
) -> None:
    """Record from which reference a model was loaded, and with which settings."""
    _references[model] = _Record(text, full or text, settings or ModelSettings())


def reference_of(model: nn.Module) -> str | None:
    """The reference that a model was loaded from, as the user wrote it; None if it was not loaded
    by this package."""
    return _references[model].text if model in _references else None


def full_reference_of(model: nn.Module) -> str | None:
    """The reference with all settings that the model was loaded with: it needs no further
    options."""
    return _references[model].full if model in _references else None


def require_used(options: LoadOptions, models: Iterable[nn.Module]) -> None:
    """Refuse options for all models with which none of these models, nor a base of a mixture among
    them, was loaded."""
    used = [
        _references[part].settings
        for model in models
        for part in model.modules()
        if part in _references
    ]
    for name, value in ModelSettings.of(options).given().items():
        if name not in DATA_OPTIONS:
            checks.require(
                any(getattr(settings, name) == value for settings in used),
                name,
                "be left out, because no model of this command takes it",
                value,
            )
