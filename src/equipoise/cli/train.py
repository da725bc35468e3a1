"""`equipoise train OBJECTIVE`: one command per objective, generated from its settings."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli import next_commands, options
from equipoise.cli.help import MODELS, GroupedCommand, GroupedCommands
from equipoise.cli.options import command
from equipoise.cli.output import Outcome, write_report
from equipoise.core import checks
from equipoise.core.settings import Settings, setting
from equipoise.data import DataSettings
from equipoise.mixing import load_model
from equipoise.mixing.folder import GATE
from equipoise.mixing.gate import WIDTH
from equipoise.models import ARCHITECTURES, LoadOptions, note_loaded, require_used
from equipoise.training import OBJECTIVES, Objective, TrainingPlan, train, train_gate
from equipoise.training.objectives.gate import GATE_PLAN, GateLoss
from equipoise.training.recipes import read_recipe
from equipoise.training.recorder import BEST

Arch = Annotated[
    str | None,
    typer.Option(
        help=f"Architecture: {', '.join(ARCHITECTURES.builtin)}.",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]
Init = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint to start from, of the same architecture; its means and "
        "standard deviations stay.",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="Per-channel means subtracted by the model, e.g. 0.49,0.48,0.45; those "
        "of the training images if not given.",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        help="Per-channel standard deviations it divides by; those of the training "
        "images if not given.",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]


def _defaults_from_recipe(context: typer.Context, name: str | None) -> str | None:
    """A recipe gives defaults; a configuration file and what is typed win."""
    if name is not None:
        settings = read_recipe(name)
        objective = settings.pop("objective")
        checks.require(
            objective == context.info_name,
            "recipe",
            f"be one for {context.info_name}",
            f"{name} for {objective}",
        )
        context.default_map = {**settings, **(context.default_map or {})}
    return name


Recipe = Annotated[
    str | None,
    typer.Option(
        help="Name of a recipe, which gives defaults for these options, e.g. "
        "cifar10_resnet18_adversarial.",
        is_eager=True,
        callback=_defaults_from_recipe,
        show_default=False,
    ),
]
TRAINING_DATA = DataSettings(split="train")
GATE_HELP = "The gate of a mixture: a network that gives every image its own alpha, for `equipoise fit --gate`."


class _Objectives(GroupedCommands):
    """The commands; the error for an unknown one suggests the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            checks.one_of("objective", args[0], [*OBJECTIVES, GateLoss.name])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="train",
    cls=_Objectives,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a classifier with an objective, or the gate of two classifiers; repeating the command "
    "resumes it.",
)


def _train(
    objective: Objective,
    plan: TrainingPlan,
    out: options.Out,
    arch: Arch = None,
    data: DataSettings = TRAINING_DATA,
    init: Init = None,
    mean: Mean = None,
    std: Std = None,
    device: options.Device = "auto",
    no_report: options.NoReport = False,
    recipe: Recipe = None,
    config: options.Config = None,
) -> Outcome:
    result = train(
        objective,
        data=data.load(),
        arch=arch,
        init=init,
        mean=mean,
        std=std,
        out=out,
        device=device,
        **plan.to_dict(),
    )
    return Outcome(
        result,
        out,
        {"checkpoint": out / BEST, **write_report(out, no_report)},
        next_commands.after_train(out / BEST, data, objective),
    )


@dataclass(frozen=True, kw_only=True)
class GateSettings(Settings):
    """The network of a gate, and the mixture that it is attacked over."""

    width: int = setting(WIDTH, "Channels of the first stage of the gate.", least=1, most=4096)
    layers: str | None = setting(
        None,
        "Layers whose features the gate reads, shallow and deep, of the accurate and of "
        "the robust model, e.g. layer1,layer2;layer1,layer2; found automatically if not "
        "given.",
    )
    over: str | None = setting(
        None,
        "A mixture of both models, mixture:DIR, over whose map and hard labels the gate "
        "is attacked, as it will be used; plain mixing if not given.",
    )


DEFAULT_GATE = GateSettings()


def _train_gate(
    accurate: options.Reference,
    robust: options.Reference,
    out: options.Out,
    objective: GateLoss,
    load: LoadOptions,
    plan: TrainingPlan = GATE_PLAN,
    data: DataSettings = TRAINING_DATA,
    network: GateSettings = DEFAULT_GATE,
    device: options.Device = "auto",
    no_report: options.NoReport = False,
    config: options.Config = None,
) -> Outcome:
    images = data.load()
    bases = [
        load_model(reference, load, num_classes=images.num_classes, image_shape=images.image_shape)
        for reference in (accurate, robust)
    ]
    require_used(load, bases)
    note_loaded(dict(zip((accurate, robust), bases, strict=True)))
    result = train_gate(
        bases[0],
        bases[1],
        data=images,
        width=network.width,
        layers=_parse_layers(network.layers),
        over=network.over,
        out=out,
        device=device,
        **objective.to_dict(),
        **plan.to_dict(),
    )
    return Outcome(
        result,
        out,
        {"gate": out / GATE, **write_report(out, no_report)},
        next_commands.after_gate(out, accurate, robust, data, objective),
    )


def _parse_layers(text: str | None) -> Any:
    if text is None:
        return None
    layers = tuple(tuple(side.split(",")) for side in text.split(";"))
    checks.require(
        [len(side) for side in layers] == [2, 2],
        "layers",
        "be two names for each model, such as layer1,layer2;layer1,layer2",
        text,
    )
    return layers


def _add_commands() -> None:
    for name, cls in OBJECTIVES.items():
        line = (inspect.getdoc(cls) or "").splitlines()[0]
        # The list of objectives shows the whole line, without its citation.
        short = re.sub(r" \[\w+[^\]]*\]", "", line)
        app.command(name, help=line, short_help=short, cls=GroupedCommand)(
            command(_train, in_processes=True, objective=cls)
        )
    app.command(GateLoss.name, help=GATE_HELP, short_help=GATE_HELP, cls=GroupedCommand)(
        command(_train_gate, in_processes=True)
    )


_add_commands()
