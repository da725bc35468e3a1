"""Settings as options: a command made from the fields of dataclasses, so that `--help` and `--config` know them all."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from equipoise.core.settings import Settings

NEEDED = inspect.Parameter.empty


def options_of(cls: type[Settings], like: Settings | None = None) -> list[inspect.Parameter]:
    """The fields of settings as options of a command; their defaults are the values of `like`, where it is given."""
    kinds, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        kind, default = kinds[field.name], field.default if like is None else getattr(like, field.name)
        if field.metadata["fraction"]:
            # Such as 8/255; the settings turn it into a number.
            kind = str | None if type(None) in typing.get_args(kind) else str
            default = None if default is None else _written(float(typing.cast(Any, default)))
        option = typer.Option(help=field.metadata["told"], show_default=default is not None)
        found.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                       annotation=Annotated[kind, option]))
    return found


def _written(value: float) -> str:
    """A number as a user would type it, with nothing lost.

    >>> _written(0.4), _written(8 / 255), _written(0.123456789)
    ('0.4', '8/255', '0.123456789')
    """
    ways = f"{value:g}", str(Fraction(value).limit_denominator(1000)), repr(value)
    return next(way for way in ways if float(Fraction(way)) == value)


def command(name: str, told: str | None, first: Mapping[str, tuple[Any, Any]], settings: Sequence[inspect.Parameter],
            run: Callable[..., None]) -> Callable[..., None]:
    """A function for Typer: `run` gets a dict of the settings, and the other options by name.

    Args:
        name: of the command.
        told: its help.
        first: options before the settings, each an annotation and a default (:data:`NEEDED` is none).
        settings: of :func:`options_of`.
        run: what it does.
    """

    def called(**given: Any) -> None:
        run({parameter.name: given.pop(parameter.name) for parameter in settings}, **given)

    before = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
              for key, (annotation, default) in first.items()]
    signature = inspect.Signature([*before, *settings])
    called.__name__, called.__doc__ = name, told
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {key: value.annotation for key, value in signature.parameters.items()}
    return called


def spared(given: dict[str, Any], context: typer.Context, where: torch.device, config: Path | None) -> str | None:
    """A note where the bf16 of a recipe has become fp32: it is a wish for GPUs, what is typed is an order."""
    source = context.get_parameter_source("precision")
    if where.type != "cpu" or given["precision"] != "bf16" or source is None or source.name != "DEFAULT_MAP":
        return None
    given["precision"] = "fp32"
    return f"note: {config} asks for bf16, which is for GPUs; on this CPU it is fp32"


def taken(cls: type[Settings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of what was given, the fields of these settings."""
    return {field.name: given[field.name] for field in dataclasses.fields(cls)}
