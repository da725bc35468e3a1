"""The commands, except `train`: each calls the public function of the same name and prints its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from equipoise import evaluation, fitting, reporting, studies
from equipoise.cli import options
from equipoise.cli.options import command
from equipoise.core import checks, parallel
from equipoise.core.threat import ThreatSettings
from equipoise.data import DataSettings, verify
from equipoise.evaluation import CertificationSettings, EvaluationSettings
from equipoise.fitting import FitSettings
from equipoise.models import LoadOptions
from equipoise.studies import STUDIES, ComparisonSettings, StudySettings

Frontier = Annotated[bool, typer.Option("--frontier", help="Also show the mixtures for other targets.")]
Study = Annotated[str, typer.Argument(help=f"Study: {', '.join(STUDIES.builtin)}.")]
StudyOut = Annotated[Path | None, typer.Option(help="Run folder; repeating the command resumes it. runs/NAME if not "
                                               "given.", show_default=False)]
_PARTS = "; ".join(f"{', '.join(study.parts)} ({name})" for name, study in STUDIES.builtin.items())
Parts = Annotated[list[str] | None, typer.Option("--part", help=f"Only this part, may be repeated: {_PARTS}.",
                                                 show_default=False)]


def _list_studies(requested: bool) -> None:
    if requested:
        options.show("\n\n".join(map(str, studies.list_studies())))
        raise typer.Exit


ListStudies = Annotated[bool, typer.Option("--list", callback=_list_studies, is_eager=True,
                                           help="List the papers and their parts, what each needs and how long it "
                                                "takes, and exit.")]


def demo(out: options.Out = Path("runs/demo"), device: options.Device = "auto", seed: options.Seed = 0) -> None:
    """Train, fit a mixture, attack and report on embedded data, in about six minutes."""
    options.show(studies.run_demo(out, device, seed))


@command
def evaluate(model: options.Models, out: options.Out, data: DataSettings, threat: ThreatSettings,
             settings: EvaluationSettings, load: LoadOptions, device: options.Device = "auto",
             no_report: options.NoReport = False, config: options.Config = None) -> None:
    """Clean and attacked accuracy of models on the same images; resumes where it stopped."""
    result = evaluation.evaluate(model, data.load(), threat=threat.threat(), out=out, device=device, load_options=load,
                                 command=options.typed_command(), **settings.to_dict())
    options.show(f"{result}\n{out / 'summary.json'}")
    options.write_report(out, no_report)


@command
def fit(accurate: options.Reference, robust: options.Reference, out: options.Out, data: DataSettings,
        threat: ThreatSettings, settings: FitSettings, load: LoadOptions, frontier: Frontier = False,
        device: options.Device = "auto", no_report: options.NoReport = False, config: options.Config = None) -> None:
    """Fit a mixture to a target on images that are never evaluated on, and write it as `mixture:DIR`."""
    images = data.load() if settings.alpha is None and settings.published is None else None  # else nothing is fitted
    result = fitting.fit(accurate, robust, images, threat=threat.threat(), out=out, device=device, load_options=load,
                         command=options.typed_command(), **settings.to_dict())
    options.show(f"{result}\n{result.frontier_table()}" if frontier else str(result))
    options.show(f"mixture:{out}")
    options.write_report(out, no_report)


@command
def certify(model: options.Models, out: options.Out, data: DataSettings, settings: CertificationSettings,
            load: LoadOptions, device: options.Device = "auto", no_report: options.NoReport = False,
            config: options.Config = None) -> None:
    """Certified ℓ2 radii (in [0, 1] pixels) by randomized smoothing; resumes where it stopped."""
    split = None if settings.clean is None else replace(data, start=0, count=None, every=1).load()
    result = evaluation.certify(model, data.load(), selection_images=split, out=out, device=device, load_options=load,
                                command=options.typed_command(), **settings.to_dict())
    options.show(f"{result}\n{out / 'summary.json'}")
    options.write_report(out, no_report)


COMPARED_DATA = DataSettings(count=128)
FitStart = Annotated[int | None, typer.Option(help="First fitting image; those after the evaluated ones if not given.",
                                              show_default=False)]
FitCount = Annotated[int, typer.Option(help="Number of fitting images.")]
Gates = Annotated[list[Path] | None, typer.Option("--gate", help="A gate from `equipoise train gate`, file or folder; "
                                                  "may be repeated.", show_default=False)]
Export = Annotated[Path | None, typer.Option(help="Folder for the rows of all methods as small compressed files.",
                                             show_default=False)]


@command
def compare_rules(accurate: options.Reference, robust: options.Reference, out: options.Out, threat: ThreatSettings,
                  settings: ComparisonSettings, load: LoadOptions, data: DataSettings = COMPARED_DATA,
                  fit_start: FitStart = None, fit_count: FitCount = 256, gate: Gates = None, export: Export = None,
                  device: options.Device = "auto") -> None:
    """Fit several rules for mixing one pair, and evaluate them all under the same attacks; resumes where it stopped."""
    images = data.load()
    after = data.start + (len(images) if data.count is None else data.count)
    fit_images = replace(data, start=after if fit_start is None else fit_start, count=fit_count, every=1).load()
    result = studies.compare_rules(accurate, robust, fit_images, images, threat=threat.threat(), gates=gate or (),
                                   out=out, export=export, device=device, load_options=load,
                                   command=options.typed_command(), **settings.to_dict())
    options.show(f"{result}\n{out / 'report.html'}")


DataName = Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100.", metavar="NAME")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data are; else $EQUIPOISE_DATA.", show_default=False)]
data_app = typer.Typer(name="data", no_args_is_help=True, rich_markup_mode=None, help="Work with the official data "
                       "sets.")


@data_app.callback()
def _data() -> None:
    pass  # without it, the one command would take the place of the group


@data_app.command("verify")
def verify_data(name: DataName, data_dir: DataDir = None) -> None:
    """Compare the files of an official data set with their recorded SHA-256 checksums."""
    parallel.require_one_process("verify")
    result = verify(name, data_dir)
    options.show(result)
    checks.require(result.ok, name, "have the official files", ", ".join(result.wrong))


Folder = Annotated[Path, typer.Argument(help="A run folder, finished or not.", metavar="DIR")]


def report(folder: Folder) -> None:
    """Write report.html into a run folder."""
    parallel.require_one_process("report")
    options.show(reporting.report(folder))


def open_report(folder: Folder) -> None:
    """Open the report of a run folder in the browser; it is written first where it is missing or out of date."""
    parallel.require_one_process("open")
    options.show(reporting.open_report(folder))


@command
def reproduce(name: Study, settings: StudySettings, out: StudyOut = None, parts: Parts = None,
              device: options.Device = "auto", list_studies: ListStudies = False) -> None:
    """Run a study of a paper and write its report."""
    report = studies.reproduce(name, out=out, parts=parts or (), device=device, command=options.typed_command(),
                               **settings.to_dict())
    options.show(report)
