"""Models as callers give them, modules or references, to evaluate under a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from equipoise.core import checks
from equipoise.mixing import load_model
from equipoise.models import LoadOptions, as_classifier, reference_of, require_used

Models = str | nn.Module | Sequence[str | nn.Module] | Mapping[str, str | nn.Module]


def load_models(
    given: Models, options: LoadOptions, beside: nn.Module | None = None
) -> dict[str, nn.Module]:
    """Models by their name in the rows: as given, else their reference, else "model"; references
    are loaded, each once.

    An option that none of them takes, nor the model that was loaded beside them, is an error.
    """
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        listed, named = (
            [given] if isinstance(given, str | nn.Module) else list(dict.fromkeys(given)),
            {},
        )
        for number, model in enumerate(listed, start=1):
            name = model if isinstance(model, str) else reference_of(model)
            named[name or ("model" if len(listed) == 1 else f"model {number}")] = model
        checks.require(
            len(named) == len(listed), "models", "be different", [str(name) for name in named]
        )
    loaded = {name: load_one(model, options) for name, model in named.items()}
    require_used(options, [*loaded.values(), *([] if beside is None else [beside])])
    return loaded


def load_one(model: str | nn.Module, options: LoadOptions) -> nn.Module:
    """The model of a reference, or the given one."""
    return (
        load_model(model, options)
        if isinstance(model, str)
        else as_classifier(model, options.image_shape)
    )
