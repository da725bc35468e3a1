"""A start page for a folder of runs: what each is, its main figures, how far it is, and a link to
its report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.core import checks, format, records
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.checks import InputError
from equipoise.core.results import Result
from equipoise.core.rows import EpochRow, Mixture
from equipoise.reporting import page
from equipoise.reporting.paired_runs import ACR, main_model
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table, read_overview
from equipoise.reporting.title import data_name, title

INDEX = "index.html"
DEPTH, MOST = 8, 2000  # levels below the folder, and runs
COLUMNS = ("run", "kind", "data", "n", "clean", "attacked", "ACR", "date", "state")
PART = "part: "  # before the kind of a run that lies inside another one
FINISHED, UNFINISHED, UNREADABLE = "finished", "not finished", "unreadable"


@dataclass(frozen=True)
class RunFolders:
    """Run folders below a folder, folders that cannot be opened with the reason, and whether there
    may be more."""

    runs: Sequence[Path]
    closed: Mapping[Path, str]
    is_complete: bool


def index(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write a start page for a folder of runs; the runs are only read.

    It lists every run below the folder (up to 8 levels and 2000 runs) with title, data, threat,
    main figures, date, how far it is, and a link to its report. Runs that cannot be read are listed
    with the reason.

    Args:
        folder: of the runs; links are not followed.
        out: the HTML file, outside of runs; `index.html` in the folder if not given. An earlier
            index there is replaced, any other file is refused.

    Returns:
        The path of the page.
    """
    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    given, wanted = Path(folder), checks.path("out", out)
    checks.require(given.is_dir(), "folder", "be a folder of runs", str(given))
    path = given / INDEX if wanted is None else wanted
    page.check_target(path, page.INDEX)
    listed = find_runs(given)
    checks.require(
        bool(listed.runs or listed.closed), "folder", "hold at least one run", str(given)
    )
    rows = [_row(run, given, path) for run in listed.runs]
    rows.sort(
        key=lambda row: row[COLUMNS.index("date")].text.strip(MISSING.text), reverse=True
    )  # in a day by folder
    rows += [_unreadable(closed, given, reason) for closed, reason in listed.closed.items()]
    states = [row[-1].text for row in rows]
    counts = [
        f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != FINISHED
    ]
    prose = [
        f"{', '.join(counts)}; the newest first."
        if counts
        else "All are finished; the newest first."
    ]
    if not listed.is_complete:
        prose.append(
            f"Only {MOST} runs, at most {DEPTH} levels below the folder, are listed; there may be more."
        )
    table = Table(
        "Clean accuracy, and accuracy in the worst case over all attacks of a run (average certified radius: "
        "ACR) of the mixture or first model, with 95 % intervals; those of trainings and fits are of "
        "held-out and of fitting images.",
        list(COLUMNS),
        rows,
        filters=("kind", "data", "state"),
    )
    place = given.resolve()
    name = f"{len(listed.runs)} run{'' if len(listed.runs) == 1 else 's'} in {'/'.join(place.parts[-2:])}"
    page.write(
        path,
        page.INDEX,
        name,
        f"Equipoise · index of {given}",
        [Section("Runs", prose, [table])],
        scripts=["run_index.js"],
    )
    return path


def find_runs(folder: Path) -> RunFolders:
    """All folders with a `run.toml` below a folder, in order; hidden folders and links are left
    out."""
    runs: list[Path] = []
    closed: dict[Path, str] = {}
    is_complete = True

    def note(error: OSError) -> None:
        closed[Path(error.filename)] = error.strerror or type(error).__name__

    for name, folders, files in os.walk(folder, onerror=note):
        here = Path(name)
        if "run.toml" in files and here != folder:
            runs.append(here)
        deeper = sorted(own for own in folders if not own.startswith("."))
        is_complete &= len(runs) < MOST and not (
            deeper and len(here.relative_to(folder).parts) >= DEPTH
        )
        folders[:] = (
            deeper if len(runs) < MOST and len(here.relative_to(folder).parts) < DEPTH else []
        )
        if len(runs) >= MOST:
            break
    return RunFolders(runs, closed, is_complete)


def _row(folder: Path, below: Path, out: Path) -> list[Cell]:
    """A run as a row of the index; one that cannot be read says why."""
    try:
        run = read_overview(folder)
        name, _ = title(run)
        figures = _figures(run)
        count = (
            run.identity["data"].get("count")
            if isinstance(run.identity.get("data"), Mapping)
            else None
        )
        n = (
            count
            if isinstance(count, int)
            else max((result.n for result in run.summary.results), default=None)
        )
        return [
            Cell(name, f"{_measured(run)}{_place(folder, below)}", link=page.link_to(folder, out)),
            Cell(f"{PART if _is_part(folder, below) else ''}{run.summary.command}"),
            Cell(data_name(run) or MISSING.text, _conditions(run)),
            MISSING if n is None else Cell(str(n), order=n),
            *figures,
            Cell(str(run.settings.get("date", MISSING.text))),
            Cell(FINISHED) if run.finished else Cell(UNFINISHED, progress(run)),
        ]
    except InputError as error:
        return _unreadable(folder, below, str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return _unreadable(
            folder, below, f"its files contradict one another ({type(error).__name__})"
        )


def _conditions(run: RunView) -> str:
    """The threat of attacks, or the noise of certificates."""
    plan = run.identity.get("plan")
    sigma = plan.get("sigma") if isinstance(plan, Mapping) else None
    return f"σ = {sigma:g}" if isinstance(sigma, float) else str(run.threat or "")


def _unreadable(folder: Path, below: Path, reason: str) -> list[Cell]:
    return [Cell(_place(folder, below), reason), *[MISSING] * (len(COLUMNS) - 2), Cell(UNREADABLE)]


def _is_part(folder: Path, below: Path) -> bool:
    """Whether a run belongs to another one, such as a training of a demo."""
    return any(
        (parent / "run.toml").exists() for parent in folder.parents if below in parent.parents
    )


def _place(folder: Path, below: Path) -> str:
    return folder.relative_to(below).as_posix()


def _figures(run: RunView) -> list[Cell]:
    """Clean and worst-case accuracy and average certified radius of the mixture, or else of the
    first model."""
    models = _models(run)
    if not models:
        return [MISSING] * 3
    model = main_model(models)
    own = {
        result.metric: result
        for result in run.summary.results
        if (result.model, result.alpha) == model
    }
    attacked = own.get(WORST) or own.get("attacked")
    shown: list[Result | None] = [own.get(CLEAN), attacked, own.get(ACR)]
    return [
        MISSING
        if result is None
        else Cell(format.value(result), format.bounds(result), order=result.value)
        for result in shown
    ]


def _measured(run: RunView) -> str:
    """Of a run with several models, which one the figures are of."""
    models = _models(run)
    return (
        f"figures of {format.mixture_names(models)[main_model(models)]} · "
        if len(models) > 1
        else ""
    )


def _models(run: RunView) -> list[Mixture]:
    return list(dict.fromkeys((result.model, result.alpha) for result in run.summary.results))


def progress(run: RunView) -> str:
    """How far an unfinished run is: the rows that it has, of those that its description asks
    for."""
    done = len(records.read_rows(run.folder))
    if any(isinstance(row, EpochRow) for row in run.rows) or run.summary.command == "train":
        plan = run.identity.get("plan")
        total = plan.get("epochs") if isinstance(plan, Mapping) else None
        return f"{done} of {total} epochs" if isinstance(total, int) else f"{done} epochs"
    attacks, models, data = (run.identity.get(key) for key in ("attacks", "models", "data"))
    images = data.get("count") if isinstance(data, Mapping) else None
    jobs = (
        len(models)
        if isinstance(models, Mapping) and run.summary.command == "certify"
        else (sum(len(own) for own in attacks.values()) if isinstance(attacks, Mapping) else 0)
    )
    if isinstance(images, int) and jobs:
        return f"{done} of {images * jobs} rows ({format.percent(done / (images * jobs))})"
    return f"{done} rows"
