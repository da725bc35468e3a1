"""Options that read the same in every verb."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from equipoise import data
from equipoise.core import checks, config
from equipoise.data import Dataset


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """A configuration file gives defaults; what is typed on the command line wins."""
    if path is not None:
        table = {key.replace("-", "_"): value for key, value in config.read(path).items()}
        flags = {p.name: getattr(p, "is_flag", False) for p in context.command.params if p.name and p.name != "config"}
        config.known(table, flags, str(path))
        for key, value in table.items():
            # The option parser would read `steps = true` as 1.
            must = "be true or false" if flags[key] else "not be true or false"
            checks.require(isinstance(value, bool) == flags[key], key, f"{must} in {path}", value)
        context.default_map = {**(context.default_map or {}), **table}
    return path


def _seed(value: int) -> int:
    return checks.whole("seed", value)


Models = Annotated[list[str], typer.Argument(help="Model references: file:PATH, mixture:DIR, zoo:NAME, "
                                             "python:MODULE:FACTORY, looks:N:REFERENCE, or a bare path.",
                                        show_default=False)]
Side = Annotated[str, typer.Option(help="Model reference.", show_default=False)]
Data = Annotated[str, typer.Option(help="shapes, digits, mnist, fashion-mnist, cifar10, cifar100, "
                                   "folder:PATH or npz:PATH.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data lies or is downloaded to; "
                                              "else $EQUIPOISE_DATA.", show_default=False)]
Split = Annotated[str, typer.Option(help="train or test.")]
Start = Annotated[int, typer.Option(help="First image of the split.")]
Count = Annotated[int | None, typer.Option(help="How many images; all if not given.", show_default=False)]
Every = Annotated[int, typer.Option(help="Take every N-th image of those.")]
Norm = Annotated[str, typer.Option(help="Norm of the perturbation: linf or l2.")]
Eps = Annotated[str, typer.Option(help="Radius in [0, 1] pixels, such as 8/255.")]
Out = Annotated[Path, typer.Option(help="Run folder; repeating the command resumes it.")]
BatchSize = Annotated[int, typer.Option(help="Images at a time; halved when memory runs out.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="auto, fp32 or bf16.")]
Seed = Annotated[int, typer.Option(help="Seed of all chance.", callback=_seed)]
Config = Annotated[Path | None, typer.Option(help="TOML file with defaults for these options.", is_eager=True,
                                             callback=_from_file, show_default=False)]
Arch = Annotated[str | None, typer.Option(help="Architecture of .pt and .pth files.", show_default=False)]
Mean = Annotated[str | None, typer.Option(help="Channel means of .pt files, such as 0.49,0.48,0.45.",
                                          show_default=False)]
Std = Annotated[str | None, typer.Option(help="Channel deviations of .pt files.", show_default=False)]


# What to train on: annotations and defaults, for commands that are made from settings.
IMAGES: dict[str, tuple[Any, Any]] = {
    "data": (Data, "cifar10"), "data_dir": (DataDir, None), "split": (Split, "train"), "start": (Start, 0),
    "count": (Count, None), "every": (Every, 1)}


def command() -> str:
    """What was typed, for the record."""
    return shlex.join(["equipoise", *sys.argv[1:]])


def images(name: str, data_dir: Path | None, split: str, start: int, count: int | None, every: int) -> Dataset:
    """The images that the common options name."""
    chosen = data.load(name, split=split, data_dir=data_dir, start=start, count=count)
    return chosen.take(torch.arange(0, len(chosen), checks.whole("every", every, least=1)))


def channels(name: str, text: str | None) -> tuple[float, ...] | None:
    """Comma-separated numbers, one per channel."""
    return None if text is None else tuple(checks.fraction(name, part) for part in text.split(","))
