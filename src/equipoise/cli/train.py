"""`equipoise train OBJECTIVE`: a classifier from images, by any of the training methods.

Every objective is a command of its own, made from the fields of its settings, so that `--help` and `--config`
know exactly what it takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from equipoise import models
from equipoise.cli import fields, options, table, train_gate
from equipoise.core import checks, parallel, records
from equipoise.core.device import pick
from equipoise.data import Dataset
from equipoise.models import checkpoint
from equipoise.training import OBJECTIVES, Objective, TrainingPlan
from equipoise.training import train as run

Arch = Annotated[str, typer.Option(help="Architecture: " + ", ".join(models.ARCHITECTURES) + ".")]
Init = Annotated[Path | None, typer.Option(help="Checkpoint to begin with, of the same architecture; its means "
                                           "and deviations stay.", show_default=False)]
Mean = Annotated[str | None, typer.Option(help="Channel means the model takes off, such as 0.49,0.48,0.45; those of "
                                          "the training images if not given.", show_default=False)]
Std = Annotated[str | None, typer.Option(help="Channel deviations it divides by; likewise.", show_default=False)]

GATE = "gate"


class _Objectives(TyperGroup):
    """The commands; an unknown one names the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            checks.one_of("objective", args[0], [*OBJECTIVES, GATE])
        return super().resolve_command(ctx, args)


app = typer.Typer(name="train", cls=_Objectives, no_args_is_help=True, rich_markup_mode=None,
                  help="Train a classifier by one of ten objectives, or the gate of two classifiers; repeating the "
                       "command resumes it.")


def _train(
    kind: type[Objective], given: dict[str, Any], *, context: typer.Context, arch: str, out: Path, data: str,
    data_dir: Path | None, split: str, start: int, count: int | None, every: int, init: Path | None, mean: str | None,
    std: str | None, device: str, config: Path | None,
) -> None:
    where = pick(device)
    note = fields.spared(given, context, where, config)
    objective, plan = kind(**fields.taken(kind, given)), TrainingPlan(**fields.taken(TrainingPlan, given))
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
        if note and world.leads:
            typer.echo(note, err=True)
        run(model, objective, images, plan, device=where, out=out, facts={"arch": arch})
        if world.leads:
            if results := records.summary(out)["results"]:
                table.show(results, "held out from training")
            typer.echo(str(Path(out) / "best.safetensors"))


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


def _command(name: str, kind: type[Objective]) -> Callable[..., None]:
    first = {
        "context": (typer.Context, fields.NEEDED), "arch": (Arch, fields.NEEDED), "out": (options.Out, fields.NEEDED),
        **options.IMAGES, "init": (Init, None), "mean": (Mean, None), "std": (Std, None),
        "device": (options.Device, "auto"), "config": (options.Config, None)}
    return fields.command(name, inspect.getdoc(kind), first, [*fields.options_of(kind), *fields.options_of(TrainingPlan)],
                          partial(_train, kind))


for _name, _kind in OBJECTIVES.items():
    _line = (inspect.getdoc(inspect.getmodule(_kind)) or "").splitlines()[0]
    # Given apart, so that the list of objectives shows it whole; the citation is for the page of the objective.
    app.command(_name, help=_line, short_help=re.sub(r" \[\w+\]", "", _line))(_command(_name, _kind))
app.command(GATE, help=train_gate.TOLD, short_help=train_gate.SHORT)(train_gate.gate)
