"""A start page for a folder of runs: what each is, its main figures, how far it is, and a link to
its report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.core import checks
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.checks import InputError
from equipoise.reporting import page
from equipoise.reporting.certificates import ACR
from equipoise.reporting.paired_runs import main_model
from equipoise.reporting.provenance import title
from equipoise.reporting.run_view import RunView, read_overview
from equipoise.reporting.section import MISSING, Cell, Section, Table, result_cell
from equipoise.reporting.sections import write_report

INDEX = "index.html"
DEPTH, MOST = 8, 2000  # levels below the folder, and runs
HEAD = (
    "run",
    "kind",
    "data",
    "n",
    "clean accuracy",
    "robust accuracy",
    "average radius",
    "date",
    "state",
)
FINISHED, UNFINISHED, UNREADABLE = "finished", "not finished", "unreadable"


@dataclass(frozen=True)
class RunFolders:
    """Run folders below a folder, folders that cannot be opened with the reason, and whether there
    may be more."""

    runs: Sequence[Path]
    closed: Mapping[Path, str]
    is_complete: bool


def write_index(folder: Path, out: Path | None) -> Path:
    """Write a page with every run below a folder."""
    checks.require(folder.is_dir(), "folder", "be a folder of runs", str(folder))
    path = folder / INDEX if out is None else out
    page.check_target(path, page.INDEX)
    listed = find_runs(folder)
    found = bool(listed.runs or listed.closed)
    checks.require(found, "folder", "hold at least one run", str(folder))
    rows = [_row(run, folder, path) for run in listed.runs]
    rows.sort(key=lambda row: row[HEAD.index("date")].text.strip(MISSING.text), reverse=True)
    for closed, reason in listed.closed.items():
        rows.append(_unreadable(closed, folder, reason))
    states = Counter(row[-1].text for row in rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    text = [f"{counts}; the newest first."]
    if not listed.is_complete:
        text.append(
            f"Only {MOST} runs, at most {DEPTH} levels below the folder, are listed; there may be more."
        )
    caption = (
        "Accuracies and average certified radius of the mixture or first model, with 95 % intervals; those of "
        "trainings and fits are of held-out and of fitting images."
    )
    table = Table(caption, HEAD, rows, is_text=True, sortable=True)
    place = "/".join(folder.resolve().parts[-2:])
    heading = f"{len(listed.runs)} run{'s' * (len(listed.runs) != 1)} in {place}"
    page.write(
        path,
        page.INDEX,
        heading,
        f"Equipoise index of {folder}",
        [Section("Runs", text, tables=[table])],
    )
    return path


def page_of(given: Path) -> Path:
    """The page that shows a run folder, a folder of runs, or a page itself; written where it is
    missing or out of date."""
    if given.is_file():
        known = page.kind_of(given) is not None
        needed = "be a run folder, a folder of runs, or a page that Equipoise wrote"
        checks.require(known, "folder", needed, str(given))
        return given
    if given.is_dir() and not (given / "run.toml").exists() and find_runs(given).runs:
        return write_index(given, None)
    path = given / "report.html"
    if not path.exists():
        return write_report(given)
    for name in ("run.toml", "summary.json", "rows.jsonl", "parts", "arrays.npz"):
        source = given / name
        if source.exists() and source.stat().st_mtime > path.stat().st_mtime:
            return write_report(given)
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
        too_deep = len(here.relative_to(folder).parts) >= DEPTH
        if len(runs) >= MOST:
            return RunFolders(runs, closed, False)
        if too_deep and deeper:
            is_complete = False
        folders[:] = [] if too_deep else deeper
    return RunFolders(runs, closed, is_complete)


def _row(folder: Path, below: Path, out: Path) -> list[Cell]:
    """A run as a row of the index; one that cannot be read says why."""
    try:
        run = read_overview(folder)
        heading, _ = title(run)
        state = Cell(FINISHED)
        if not run.finished:
            state = Cell(UNFINISHED, run.progress)
        part = "part: " * _is_part(folder, below)
        threat = str(run.threat or "")
    except InputError as error:
        return _unreadable(folder, below, str(error))
    n = run.data.get("count")
    if not isinstance(n, int):
        n = max((result.n for result in run.summary.results), default=None)
    link = page.link_to(folder, out)
    return [
        Cell(heading, folder.relative_to(below).as_posix(), link=link),
        Cell(f"{part}{run.summary.command}"),
        Cell(run.data_name or MISSING.text, threat),
        Cell("" if n is None else str(n), order=n),
        *_figures(run),
        Cell(str(run.settings.get("date", MISSING.text))),
        state,
    ]


def _unreadable(folder: Path, below: Path, reason: str) -> list[Cell]:
    place = folder.relative_to(below).as_posix()
    return [Cell(place, reason), *[MISSING] * (len(HEAD) - 2), Cell(UNREADABLE)]


def _is_part(folder: Path, below: Path) -> bool:
    """Whether a run belongs to another one, such as a training of a demo."""
    inside = [parent for parent in folder.parents if below in parent.parents]
    return any((parent / "run.toml").exists() for parent in inside)


def _figures(run: RunView) -> list[Cell]:
    """Clean and robust accuracy and average certified radius of the mixture, or of the first
    model."""
    if not run.measured:
        return [MISSING] * 3
    model, alpha = main_model(run.measured)
    robust = run.find(model, WORST, alpha) or run.find(model, "attacked", alpha)
    clean, radius = run.find(model, CLEAN, alpha), run.find(model, ACR, alpha)
    return [result_cell(clean), result_cell(robust), result_cell(radius)]
