"""Options: those that every command shares, and one per field of a settings class."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
import typing
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli import output
from equipoise.cli.help import COMPUTATION, DATA, MODELS, OUTPUT, THREAT
from equipoise.core import checks, config, launch, parallel
from equipoise.core.settings import Settings
from equipoise.core.threat import ThreatSettings
from equipoise.data import DataSettings
from equipoise.evaluation import CertificationSettings, EvaluationSettings
from equipoise.fitting import FitSettings
from equipoise.models import LoadOptions
from equipoise.training import TrainingPlan

EMPTY = inspect.Parameter.empty
# The heading of options in `--help`: that of their settings class, except for some by name.
HEADINGS: dict[type[Settings], str] = {
    LoadOptions: MODELS,
    DataSettings: DATA,
    ThreatSettings: THREAT,
    EvaluationSettings: THREAT,
    CertificationSettings: "Certificate",
    FitSettings: "Mixture",
    TrainingPlan: "Training",
}
OBJECTIVE = "Objective"  # of the classes of training objectives
HEADING_OF = {
    **dict.fromkeys(("accurate", "robust", "gate", "stand_in", "like", "allow_code"), MODELS),
    **dict.fromkeys(DataSettings.names(), DATA),
    **dict.fromkeys(("norm", "eps"), THREAT),
    **dict.fromkeys(("save_adversarial", "bundle"), OUTPUT),
    **dict.fromkeys(("batch_size", "precision", "seed", "compile", "save_seconds"), COMPUTATION),
}


def _defaults_from_file(context: typer.Context, path: Path | None) -> Path | None:
    """A configuration file gives defaults; what is typed on the command line wins."""
    if path is not None:
        table = {key.replace("-", "_"): value for key, value in config.read(path).items()}
        flags = {
            p.name: getattr(p, "is_flag", False)
            for p in context.command.params
            if p.name and p.name != "config"
        }
        for key, value in table.items():
            checks.one_of(f"key in {path}", key, flags)
            # The option parser would read `steps = true` as 1.
            must = "be true or false" if flags[key] else "not be true or false"
            checks.require(isinstance(value, bool) == flags[key], key, f"{must} in {path}", value)
        context.default_map = {**(context.default_map or {}), **table}
    return path


def _check_processes(value: int) -> int:
    """The processes were started before this one, by `cli/main.py`."""
    checks.whole("processes", value, least=1, most=launch.MOST)
    is_torchrun = parallel.processes_started() > 1 and launch.started_here() == 1
    checks.require(not is_torchrun or value == 1, "processes", "be left out under torchrun", value)
    checks.require(
        value in (1, launch.started_here()), "processes", "be typed as an option, and once", value
    )
    return value


Models = Annotated[
    list[str],
    typer.Argument(
        help="Model references: file:PATH, mixture:DIR, zoo:NAME, "
        "python:FILE.py:NAME, timm:NAME, torchvision:NAME, hf:REPOSITORY, "
        "exported:PATH, onnx:PATH, robustbench:DATASET/THREAT/ID, http:ADDRESS, "
        "each with settings such as ?arch=resnet20 (docs/models.md), "
        "tta:N:REFERENCE (test-time augmentation), "
        "smoothed:SIGMA,N:REFERENCE (randomized smoothing with N samples, 100 if "
        "left out), or a bare path.",
        metavar="MODEL",
        show_default=False,
        rich_help_panel=MODELS,
    ),
]
Reference = Annotated[
    str, typer.Option(help="Model reference.", show_default=False, rich_help_panel=MODELS)
]
Out = Annotated[
    Path, typer.Option(help="Run folder; repeating the command resumes it.", rich_help_panel=OUTPUT)
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=COMPUTATION)]
Seed = Annotated[
    int, typer.Option(help="Random seed.", callback=checks.seed, rich_help_panel=COMPUTATION)
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with defaults for these options.",
        is_eager=True,
        callback=_defaults_from_file,
        show_default=False,
    ),
]
NoReport = Annotated[
    bool,
    typer.Option(
        "--no-report",
        envvar="EQUIPOISE_NO_REPORT",
        help="Write no report.html into the run folder.",
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the summary as JSON instead of the table.", rich_help_panel=OUTPUT
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        help="Print nothing but errors; with --json, the summary alone.",
        rich_help_panel=OUTPUT,
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        help="Processes on this machine that divide the images among them, on CUDA "
        "with a GPU each. On several machines use torchrun.",
        callback=_check_processes,
        rich_help_panel=COMPUTATION,
    ),
]
IN_EVERY_COMMAND = {"json": Json, "quiet": Quiet}


def typed_command() -> str:
    """The command line as typed, for `run.toml`, without what only concerns the terminal."""
    return shlex.join(
        ["equipoise", *(word for word in sys.argv[1:] if word not in ("--json", "--quiet"))]
    )


def command(
    function: Callable[..., output.Outcome],
    *,
    in_processes: bool = False,
    **settings: type[Settings],
) -> Callable[..., None]:
    """A function for Typer that parses the options of `function`'s settings, calls it and prints
    the outcome.

    Args:
        function: its parameters are options as Typer knows them, or annotated with a
            :class:`Settings` class; a settings object as default gives the defaults of its fields.
            What it returns is printed, also as the options `--json` and `--quiet` want it, which
            every command gets here.
        in_processes: whether it has the option `--processes`.
        settings: the classes of parameters whose annotation is only a base class.
    """
    hints = {**typing.get_type_hints(function, include_extras=True), **settings}
    groups: dict[
        str, tuple[type[Settings], list[str]]
    ] = {}  # the class of every parameter, and its options
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and issubclass(hint, Settings):
            own = _options_of(hint, None if parameter.default is EMPTY else parameter.default)
            groups[parameter.name] = (hint, [option.name for option in own])
            options += own
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))
    options += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=False)
        for name, hint in IN_EVERY_COMMAND.items()
    ]
    if in_processes:
        options.append(
            inspect.Parameter(
                "processes", inspect.Parameter.KEYWORD_ONLY, annotation=Processes, default=1
            )
        )

    def run(json: bool, quiet: bool, processes: int = 1, **given: Any) -> None:
        # Only its options: a field of the same name that only callers of a function give belongs to
        # another group.
        grouped = {
            key: cls(**{name: given.pop(name) for name in names})
            for key, (cls, names) in groups.items()
        }
        with output.during(json, quiet):
            outcome = function(**grouped, **given)
        output.show(outcome, json, quiet)
        if outcome.check is not None:
            outcome.check()

    run.__name__, run.__doc__ = function.__name__, inspect.getdoc(function)
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options_of(cls: type[Settings], defaults: Settings | None = None) -> list[inspect.Parameter]:
    """The fields of a settings class as options; `defaults` gives other default values."""
    hints, options = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata:  # a setting that only callers of the function give
            continue
        hint = hints[field.name]
        default: Any = field.default if defaults is None else getattr(defaults, field.name)
        required = default is dataclasses.MISSING
        if list[str] in typing.get_args(hint):
            hint = list[str] | None
        elif field.metadata.get("fraction") or str in typing.get_args(
            hint
        ):  # such as 8/255, which the settings parse
            hint = str | None if type(None) in typing.get_args(hint) else str
            default = (
                default
                if required or default is None or isinstance(default, str)
                else written(float(default))
            )
        flags = [f"--{field.name.replace('_', '-')}"] if hint is bool else []
        option = typer.Option(
            *flags,
            help=field.metadata["help"],
            show_default=not required and default is not None,
            rich_help_panel=HEADING_OF.get(field.name) or HEADINGS.get(cls, OBJECTIVE),
        )
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[hint, option],
                default=EMPTY if required else default,
            )
        )
    return options


def written(value: float) -> str:
    """A number as a user would type it, without loss.

    >>> written(0.4), written(8 / 255), written(0.123456789)
    ('0.4', '8/255', '0.123456789')
    """
    forms = f"{value:g}", str(Fraction(value).limit_denominator(1000)), repr(value)
    return next(form for form in forms if float(Fraction(form)) == value)
