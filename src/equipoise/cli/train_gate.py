"""`equipoise train gate`: the network that gives every image its own alpha, for two frozen classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise import mixing, models
from equipoise.cli import fields, options
from equipoise.core import checks, parallel
from equipoise.core.device import pick
from equipoise.data import pixels
from equipoise.mixing import GatedClassifier, new_gate
from equipoise.mixing.gate import WIDTH, Pair, save_gate
from equipoise.training import TrainingPlan
from equipoise.training import train as run
from equipoise.training.objectives.gate import PLAN, GateLoss

SHORT = "The gate of a mixture: an alpha for every image, for `equipoise fit --gate`."
TOLD = ("The gate of a mixture [Bai2024]: an alpha for every image, from features of both classifiers; for `equipoise "
        "fit --gate`. Images that were cropped with a border, or blotted, are refused: an attack on blanks shows.")
Width = Annotated[int, typer.Option(help="Channels of its first stage.")]
Taps = Annotated[str | None, typer.Option(help="Layers to look at, shallow and deep, of the accurate and of the robust "
                                          "model, such as layer1,layer2;layer1,layer2; found if not given.",
                                          show_default=False)]


def _gate(given: dict[str, Any], *, context: typer.Context, accurate: str, robust: str, out: Path, data: str,
          data_dir: Path | None, split: str, start: int, count: int | None, every: int, width: int, taps: str | None,
          arch: str | None, mean: str | None, std: str | None, device: str, config: Path | None) -> None:
    where = pick(device)
    note = fields.spared(given, context, where, config)
    objective, plan = GateLoss(**fields.taken(GateLoss, given)), TrainingPlan(**fields.taken(TrainingPlan, given))
    images = options.images(data, data_dir, split, start, count, every)
    wishes: dict[str, Any] = {"arch": arch, "mean": options.channels("mean", mean), "std": options.channels("std", std)}
    g, h = (models.load(text, num_classes=images.num_classes, image_shape=images.image_shape, **wishes)
            for text in (accurate, robust))
    network = new_gate(g, h, pixels(images.images[:2]), taps=_taps(taps), width=width, seed=plan.seed)
    with parallel.started(where) as world:
        if note and world.leads:
            typer.echo(note, err=True)
        model = GatedClassifier(g, h, network)
        run(model, objective, images, plan, device=where, out=out, facts={"arch": "gated"})
        if world.leads:
            save_gate(out / mixing.folder.GATE, model.network, g, h, {"objective": repr(objective)})
            typer.echo(str(out / mixing.folder.GATE))


def _taps(text: str | None) -> Pair | None:
    if text is None:
        return None
    named = [tuple(side.split(",")) for side in text.split(";")]
    checks.require([len(side) for side in named] == [2, 2], "taps", "be two names for each model, such as "
                   "layer1,layer2;layer1,layer2", text)
    return (named[0][0], named[0][1]), (named[1][0], named[1][1])


gate = fields.command("gate", TOLD, {
    "context": (typer.Context, fields.NEEDED), "accurate": (options.Side, fields.NEEDED),
    "robust": (options.Side, fields.NEEDED), "out": (options.Out, fields.NEEDED), **options.IMAGES,
    "width": (Width, WIDTH), "taps": (Taps, None), "arch": (options.Arch, None), "mean": (options.Mean, None),
    "std": (options.Std, None), "device": (options.Device, "auto"), "config": (options.Config, None),
}, [*fields.options_of(GateLoss), *fields.options_of(TrainingPlan, PLAN)], _gate)
