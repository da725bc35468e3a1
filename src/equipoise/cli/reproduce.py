"""`equipoise reproduce NAME`: a study of the papers, from the first image to the page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer

from equipoise.cli import options
from equipoise.core import checks
from equipoise.core.device import pick
from equipoise.studies import reproduce as studies

_PARTS = "; ".join(f"{', '.join(study.PARTS)} ({name})" for name, study in studies.STUDIES.items())


def reproduce(
    name: Annotated[str, typer.Argument(help="Study: " + ", ".join(studies.STUDIES) + ".")],
    out: Annotated[Path | None, typer.Option(help="Run folder; repeating the command resumes it. runs/NAME if not "
                                             "given.", show_default=False)] = None,
    size: Annotated[str, typer.Option(help="smoke (minutes on two cores) or full.")] = "smoke",
    part: Annotated[list[str] | None, typer.Option(help=f"Only this part, may be repeated: {_PARTS}.",
                                                   show_default=False)] = None,
    accurate: Annotated[str | None, typer.Option(help="The accurate model, for full.", show_default=False)] = None,
    robust: Annotated[str | None, typer.Option(help="The robust model, for full.", show_default=False)] = None,
    data: Annotated[str | None, typer.Option(help="Data set of both, as in `evaluate`, for full; cifar10 if not given.",
                                             show_default=False)] = None,
    data_dir: options.DataDir = None,
    norm: Annotated[str | None, typer.Option(help="Norm of the perturbation, linf or l2, for full; linf if not given.",
                                             show_default=False)] = None,
    eps: Annotated[str | None, typer.Option(help="Radius in [0, 1] pixels, for full; 8/255 in linf if not given.",
                                            show_default=False)] = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
) -> None:
    """Repeat a study and write its page."""
    if size == "smoke":
        torch.set_num_threads(1)  # as in the demo: then the numbers do not depend on the cores
    named = [("accurate", accurate), ("robust", robust), ("data", data), ("norm", norm), ("eps", eps)]
    command = " ".join([f"equipoise reproduce {name} --size {size} --seed {seed}",
                        *(f"--{option} {shlex.quote(value)}" for option, value in named if value is not None)])
    radius = None if eps is None else checks.fraction("eps", eps)
    page = studies.reproduce(name, out or Path("runs") / name, size, pick(device), seed=seed, parts=part or (),
                             accurate=accurate, robust=robust, data=data, data_dir=data_dir, norm=norm, eps=radius,
                             command=command)
    typer.echo(str(page))
