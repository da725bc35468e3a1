"""`equipoise train OBJECTIVE`: a classifier from images, by any of the training methods.

Every objective is a command of its own, made from the fields of its settings, so that `--help` and `--config`
know exactly what it takes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from equipoise import checks, models, parallel, records
from equipoise.cli import options, table
from equipoise.data import Dataset
from equipoise.device import pick
from equipoise.models import checkpoint
from equipoise.train import OBJECTIVES, Objective, Plan
from equipoise.train import train as run
from equipoise.train.settings import Settings

Arch = Annotated[str, typer.Option(help="Architecture: " + ", ".join(models.ARCHITECTURES) + ".")]
Init = Annotated[Path | None, typer.Option(help="Checkpoint to begin with, of the same architecture; its means "
                                           "and deviations stay.", show_default=False)]
Mean = Annotated[str | None, typer.Option(help="Channel means the model takes off, such as 0.49,0.48,0.45; those of "
                                          "the training images if not given.", show_default=False)]
Std = Annotated[str | None, typer.Option(help="Channel deviations it divides by; likewise.", show_default=False)]


class _Objectives(TyperGroup):
    """The commands; an unknown one names the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            checks.one_of("objective", args[0], OBJECTIVES)
        return super().resolve_command(ctx, args)


app = typer.Typer(name="train", cls=_Objectives, no_args_is_help=True, rich_markup_mode=None,
                  help="Train a classifier by one of ten objectives; repeating the command resumes it.")


def _train(
    kind: type[Objective], given: dict[str, Any], *, context: typer.Context, arch: str, out: Path, data: str,
    data_dir: Path | None, split: str, start: int, count: int | None, every: int, init: Path | None, mean: str | None,
    std: str | None, device: str, config: Path | None,
) -> None:
    where = pick(device)
    spared = where.type == "cpu" and given["precision"] == "bf16" and _is_from_recipe(context, "precision")
    if spared:
        given["precision"] = "fp32"
    objective = kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)})
    plan = Plan(**{field.name: given[field.name] for field in dataclasses.fields(Plan)})
    images = options.images(data, data_dir, split, start, count, every)
    said = [_per_channel(name, text, images) for name, text in (("mean", mean), ("std", std))]
    if init is None:
        means, stds = (typed or found for typed, found in zip(said, _measured(images), strict=True))
        model = models.build(arch, num_classes=images.num_classes, image_shape=images.image_shape, mean=means, std=stds,
                             seed=plan.seed)
    else:
        model = checkpoint.load(init, arch, num_classes=images.num_classes, image_shape=images.image_shape,
                                mean=said[0], std=said[1])
    with parallel.started(where) as world:
        if spared and world.leads:
            typer.echo(f"note: {config} asks for bf16, which is for GPUs; on this CPU it is fp32", err=True)
        run(model, objective, images, plan, device=where, out=out, facts={"arch": arch})
        if world.leads:
            if results := records.summary(out)["results"]:
                table.show(results, "held out from training")
            typer.echo(str(Path(out) / "best.safetensors"))


def _is_from_recipe(context: typer.Context, name: str) -> bool:
    """Whether an option has the value of the `--config` file: a wish, where the command line is an order."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _per_channel(name: str, text: str | None, images: Dataset) -> list[float] | None:
    """Numbers as given, one for each channel; a single one is for all."""
    said = options.channels(name, text)
    return None if said is None else list(said) * (images.image_shape[0] if len(said) == 1 else 1)


def _measured(images: Dataset) -> tuple[list[float], list[float]]:
    """Mean and deviation of every channel, to four digits."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    shown: list[list[float]] = [[], []]
    for channel in images.images.unbind(dim=1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        centre = (share * levels).sum()
        spread = (share * (levels - centre) ** 2).sum().sqrt().clamp_min(1e-3)
        shown[0].append(round(float(centre), 4))
        shown[1].append(round(float(spread), 4))
    return shown[0], shown[1]


def _options(cls: type[Settings]) -> list[inspect.Parameter]:
    """The fields of settings as options of a command."""
    kinds, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        kind, default = kinds[field.name], field.default
        if field.metadata["fraction"]:
            # Such as 8/255; the settings turn it into a number.
            kind = str | None if type(None) in typing.get_args(kind) else str
            default = None if default is None else f"{default:g}"
        option = typer.Option(help=field.metadata["told"], show_default=default is not None)
        found.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                       annotation=Annotated[kind, option]))
    return found


def _command(name: str, kind: type[Objective]) -> Callable[..., None]:
    own, plan = _options(kind), _options(Plan)

    def command(**given: Any) -> None:
        settings = {parameter.name: given.pop(parameter.name) for parameter in (*own, *plan)}
        _train(kind, settings, **given)

    def option(key: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
        return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    first = [option("context", typer.Context), option("arch", Arch), option("out", options.Out),
             option("data", options.Data, "cifar10"), option("data_dir", options.DataDir, None),
             option("split", options.Split, "train"), option("start", options.Start, 0),
             option("count", options.Count, None), option("every", options.Every, 1), option("init", Init, None),
             option("mean", Mean, None), option("std", Std, None), option("device", options.Device, "auto"),
             option("config", options.Config, None)]
    signature = inspect.Signature([*first, *own, *plan])
    command.__name__, command.__doc__ = name, inspect.getdoc(kind)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {key: value.annotation for key, value in signature.parameters.items()}
    return command


for _name, _kind in OBJECTIVES.items():
    _line = (inspect.getdoc(inspect.getmodule(_kind)) or "").splitlines()[0]
    # Given apart, so that the list of objectives shows it whole; the citation is for the page of the objective.
    app.command(_name, help=_line, short_help=re.sub(r" \[\w+\]", "", _line))(_command(_name, _kind))
