"""From what a scheme loaded to a classifier: preprocessing in front, logits alone, classes in the
order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from equipoise.core.checks import InputError, shorten
from equipoise.models.layers import resizing
from equipoise.models.layers.labels import SelectClasses, parse_labels
from equipoise.models.layers.resizing import Preprocess, Preprocessing
from equipoise.models.loaded import LoadedModel, ModelInfo, describe_module
from equipoise.models.options import LoadOptions, ModelSettings
from equipoise.models.outputs import Logits


def assemble(
    loaded: nn.Module | LoadedModel, reference: str, settings: ModelSettings, options: LoadOptions
) -> tuple[nn.Module, ModelInfo]:
    """The model of a reference, and what is known of it.

    A network that needs neither preprocessing nor other classes is returned as it is.

    Args:
        loaded: what the loader of the scheme returned.
        reference: its name in messages.
        settings: of the reference.
        options: `num_classes` is that of the data.
    """
    if isinstance(loaded, nn.Module):
        loaded = LoadedModel(loaded, describe_module(loaded))
    network, info = loaded.network, loaded.info
    layers: list[nn.Module] = [network]
    preprocessing = _merge(loaded.preprocessing, settings)
    if preprocessing is not None:
        channels = None if info.input_shape is None else info.input_shape[0]
        layers = [Preprocess(preprocessing, channels), network]
        info = replace(
            info,
            normalization=_in_words(info, loaded.preprocessing, preprocessing, settings),
            of_zoo=False,
        )
    if loaded.preprocessing is not None:
        layers.append(Logits())
    if settings.labels is not None:
        classes = parse_labels(settings.labels, info.class_names, info.num_classes)
        layers.append(SelectClasses(classes))
        if info.num_classes is not None and max(classes) >= info.num_classes:
            raise InputError(
                f"`labels` must be classes of {shorten(reference, 80)}, which lie in "
                f"0..{info.num_classes - 1}, got {max(classes)}"
            )
        info = replace(
            info,
            num_classes=len(classes),
            of_zoo=False,
            class_names=tuple(info.class_names[number] for number in classes)
            if info.class_names
            else (),
        )
    if (
        None not in (options.num_classes, info.num_classes)
        and options.num_classes != info.num_classes
    ):
        raise InputError(
            f"`{shorten(reference, 80)}` must have the {options.num_classes} classes of the data, got "
            f"{info.num_classes}; ?labels=… says which of them they are"
        )
    return (network if len(layers) == 1 else nn.Sequential(*layers)), info


def _merge(own: Preprocessing | None, settings: ModelSettings) -> Preprocessing | None:
    """The preprocessing of a model, of which the settings of its reference replace parts."""
    merged = own
    if settings.preset is not None:
        sizes = resizing.preset(settings.preset)
        merged = replace(
            own or Preprocessing(),
            resize=sizes.resize,
            crop=sizes.crop,
            interpolation=sizes.interpolation,
        )
    if (
        own is not None and merged is not None
    ):  # other loaders build mean and std into their network
        merged = replace(
            merged,
            mean=merged.mean if settings.mean is None else _numbers(settings.mean),
            std=merged.std if settings.std is None else _numbers(settings.std),
        )
    return merged


def _numbers(values: str | Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))  # the settings have parsed text


def _in_words(
    info: ModelInfo, own: Preprocessing | None, used: Preprocessing, settings: ModelSettings
) -> str:
    origin = "reference" if settings.mean is not None or settings.std is not None else used.origin
    numbers = ", ".join(
        f"{name} {','.join(f'{number:g}' for number in value)}"
        for name, value in (("mean", used.mean), ("std", used.std))
        if value is not None
    )
    text = (
        info.normalization
        if own is None
        else f"{numbers} ({origin or 'none given'})"
        if numbers
        else (origin or "none")
    )
    if settings.preset is None and str(used) == "none":
        return text
    return f"{text}, after {used} ({'reference' if settings.preset is not None else used.origin or 'none given'})"
