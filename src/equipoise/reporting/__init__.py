"""Reports: a run folder as one self-contained page, several runs compared, and a list of the runs of
a folder.

Figures are drawn by Altair and vl-convert, which are imported where a page is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path

from equipoise.core import checks, progress
from equipoise.core.checks import InputError

COMPARISON = Path("comparison.html")
PACKAGES = {"altair": "altair", "vl_convert": "vl-convert-python"}  # that draw figures


def report(folder: Path | str) -> Path:
    """Write `report.html` and `figures/` into a run folder; that of an unfinished run says how far
    it is.

    The report is a pure function of the folder (`run.toml`, `rows.jsonl`, `summary.json` and
    perhaps `arrays.npz` and runs in subfolders): the same rows give the same page. No model is
    loaded, and neither this function nor the report downloads anything.

    Returns:
        The path of the report.
    """
    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    _require_packages()
    from equipoise.reporting import sections

    return sections.write_report(Path(folder))


def compare(folders: Sequence[Path | str], out: Path | str = COMPARISON) -> Path:
    """Write one self-contained page over several runs of one kind; the runs are only read, nothing
    is computed anew.

    The page has the results of all runs with paired differences from the first one on common
    images, what makes the comparison unfair, their curves in one figure each, and the settings that
    differ. It is a pure function of the runs.

    Args:
        folders: at least two run folders, finished or not; the first is the one that others are
            compared with.
        out: the HTML file, outside of runs; an earlier comparison there is replaced, any other file
            is refused.

    Returns:
        The path of the page.
    """
    got = type(folders).__name__
    checks.require(isinstance(folders, list | tuple), "folders", "be a list of run folders", got)
    for folder in folders:
        checks.path("folders", checks.instance("folders", folder, (str, Path), "be paths"))
    checks.path("out", checks.instance("out", out, (str, Path), "be a path"))
    _require_packages()
    from equipoise.reporting import comparison

    return comparison.write_comparison([Path(folder) for folder in folders], Path(out))


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
    wanted = checks.path("out", out)
    _require_packages()
    from equipoise.reporting import run_index

    return run_index.write_index(Path(folder), wanted)


def open_report(folder: Path | str) -> Path:
    """Open the report of a run folder in the browser; it is written first where it is missing or
    out of date.

    A folder of runs has an index, which is written anew; a page that was written elsewhere is
    opened as it is.

    Returns:
        The path of the page.
    """
    import webbrowser

    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    _require_packages()
    from equipoise.reporting import run_index

    path = run_index.page_of(Path(folder))
    webbrowser.open(path.resolve().as_uri())
    return path


def report_after_run(folder: Path | str) -> Path | None:
    """The report of a run that has just ended; where the packages for it are missing, a note says
    how to write it later."""
    missing = missing_packages()
    if missing:
        progress.note(f"no report: pip install {' '.join(missing)}, then equipoise report {folder}")
        return None
    return report(folder)


def missing_packages() -> list[str]:
    """What is to be installed before figures can be drawn."""
    return [package for name, package in PACKAGES.items() if util.find_spec(name) is None]


def _require_packages() -> None:
    missing = missing_packages()
    if missing:
        raise InputError(f"a report needs {' and '.join(missing)}: pip install {' '.join(missing)}")
