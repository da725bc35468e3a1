"""The commands, except `train`: each calls the public function of the same name and prints its
result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from equipoise import evaluation, fitting, reporting
from equipoise.cli import next_commands, options
from equipoise.cli.help import DATA, OUTPUT, GroupedCommand, GroupedCommands
from equipoise.cli.options import command
from equipoise.cli.output import Outcome, write_report
from equipoise.core import checks, parallel
from equipoise.core.threat import ThreatSettings
from equipoise.data import DataSettings, verify
from equipoise.evaluation import CertificationSettings, EvaluationSettings
from equipoise.evaluation.adversarial import FILE as ADVERSARIAL
from equipoise.fitting import FitSettings
from equipoise.models import LoadOptions

Frontier = Annotated[
    bool,
    typer.Option(
        "--frontier", help="Also show the mixtures for other targets.", rich_help_panel=OUTPUT
    ),
]


@command
def demo(
    out: options.Out = Path("runs/demo"),
    device: options.Device = "auto",
    seed: options.Seed = 0,
    no_report: options.NoReport = False,
) -> Outcome:
    """Train, fit a mixture, attack and report on embedded data."""
    from equipoise.cli.demo import run_demo

    return Outcome(run_demo(out, device, seed, report=not no_report), out, next=["open", out])


@partial(command, in_processes=True)
def evaluate(
    model: options.Models,
    out: options.Out,
    data: DataSettings,
    threat: ThreatSettings,
    settings: EvaluationSettings,
    load: LoadOptions,
    device: options.Device = "auto",
    no_report: options.NoReport = False,
    config: options.Config = None,
) -> Outcome:
    """Clean and robust accuracy of models on the same images; resumes where it stopped."""
    result = evaluation.evaluate(
        model,
        data.load(),
        threat=threat.threat(),
        out=out,
        device=device,
        load_options=load,
        command=options.typed_command(),
        **settings.to_dict(),
    )
    images = (
        {
            "attacked images": out / ADVERSARIAL,
            "for RobustBench": ", ".join(map(str, sorted(out.glob("*.pt")))),
        }
        if settings.save_adversarial
        else {}
    )
    return Outcome(
        result,
        out,
        {"results": out / "summary.json", **images, **write_report(out, no_report)},
        next_commands.after_evaluate(result.summary, out, settings.attack),
    )


@command
def fit(
    accurate: options.Reference,
    robust: options.Reference,
    out: options.Out,
    data: DataSettings,
    threat: ThreatSettings,
    settings: FitSettings,
    load: LoadOptions,
    frontier: Frontier = False,
    device: options.Device = "auto",
    no_report: options.NoReport = False,
    config: options.Config = None,
) -> Outcome:
    """Fit a mixture to a target on images that are never evaluated on, and write it as
    `mixture:DIR`."""
    images = (
        data.load() if settings.alpha is None and settings.published is None else None
    )  # else nothing is fitted
    result = fitting.fit(
        accurate,
        robust,
        images,
        threat=threat.threat(),
        out=out,
        device=device,
        load_options=load,
        command=options.typed_command(),
        **settings.to_dict(),
    )
    following = next_commands.after_fit(out, data, threat, load, images is not None)
    return Outcome(
        result,
        out,
        {"mixture": f"mixture:{out}", **write_report(out, no_report)},
        following,
        result.frontier_table() if frontier else "",
    )


@partial(command, in_processes=True)
def certify(
    model: options.Models,
    out: options.Out,
    data: DataSettings,
    settings: CertificationSettings,
    load: LoadOptions,
    device: options.Device = "auto",
    no_report: options.NoReport = False,
    config: options.Config = None,
) -> Outcome:
    """Certified ℓ2 radii (in [0, 1] pixels) by randomized smoothing; resumes where it stopped."""
    split = None if settings.clean is None else replace(data, start=0, count=None, every=1).load()
    result = evaluation.certify(
        model,
        data.load(),
        selection_images=split,
        out=out,
        device=device,
        load_options=load,
        command=options.typed_command(),
        **settings.to_dict(),
    )
    return Outcome(
        result,
        out,
        {"results": out / "summary.json", **write_report(out, no_report)},
        ["open", out],
    )


DataName = Annotated[
    str,
    typer.Argument(
        help="mnist, fashion-mnist, cifar10 or cifar100.", metavar="NAME", rich_help_panel=DATA
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Where the data are; else $EQUIPOISE_DATA.", show_default=False, rich_help_panel=DATA
    ),
]
data_app = typer.Typer(
    name="data",
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Work with the official data sets.",
)


@data_app.callback()
def _data() -> None:
    pass  # without it, the one command would take the place of the group


@data_app.command("verify", cls=GroupedCommand)
@command
def verify_data(name: DataName, data_dir: DataDir = None) -> Outcome:
    """Compare the files of an official data set with their recorded SHA-256 checksums."""
    parallel.require_one_process("verify")
    result = verify(name, data_dir)
    return Outcome(
        result,
        check=lambda: checks.require(
            result.ok, name, "have the official files", ", ".join(result.wrong)
        ),
    )


Folder = Annotated[
    Path,
    typer.Argument(help="A run folder, finished or not.", metavar="DIR", rich_help_panel="Runs"),
]


@command
def report(folder: Folder) -> Outcome:
    """Write report.html into a run folder."""
    parallel.require_one_process("report")
    return Outcome("", files={"report": reporting.report(folder)}, next=["open", folder])


Folders = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders of one kind, at least two; the others are compared with the first.",
        metavar="DIR",
        show_default=False,
        rich_help_panel="Runs",
    ),
]
ComparisonOut = Annotated[
    Path,
    typer.Option(
        help="HTML file, outside of runs; an earlier comparison is replaced.",
        rich_help_panel=OUTPUT,
    ),
]


@command
def compare(folders: Folders, out: ComparisonOut = reporting.COMPARISON) -> Outcome:
    """Compare existing runs on one page."""
    parallel.require_one_process("compare")
    path = reporting.compare(folders, out)
    return Outcome("", files={"comparison": path}, next=["open", path])


RunsFolder = Annotated[
    Path,
    typer.Argument(
        help="A folder with run folders in it, at any depth.", metavar="DIR", rich_help_panel="Runs"
    ),
]
IndexOut = Annotated[
    Path | None,
    typer.Option(
        help="HTML file, outside of runs; DIR/index.html if not given. An "
        "earlier index is replaced.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]


@command
def index(folder: RunsFolder, out: IndexOut = None) -> Outcome:
    """List all runs below a folder on one page, with main figures and links to their reports."""
    parallel.require_one_process("index")
    path = reporting.index(folder, out)
    return Outcome("", files={"index": path}, next=["open", path])


Opened = Annotated[
    Path,
    typer.Argument(
        help="A run folder, finished or not, a folder of runs, or an HTML page.",
        metavar="DIR",
        rich_help_panel="Runs",
    ),
]


@command
def open_report(folder: Opened) -> Outcome:
    """Open the report of a run, or the index of a folder of runs, in the browser; it is written
    first where it is missing or out of date."""
    parallel.require_one_process("open")
    return Outcome("", files={"report": reporting.open_report(folder)})
