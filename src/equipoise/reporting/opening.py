"""Open a report, a comparison or an index in the browser."""

from __future__ import annotations

from pathlib import Path

from equipoise.core import checks
from equipoise.reporting import page
from equipoise.reporting.render import report
from equipoise.reporting.run_index import find_runs, index


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
    path = _page(Path(folder))
    webbrowser.open(path.resolve().as_uri())
    return path


def _page(given: Path) -> Path:
    if given.is_file():
        checks.require(
            page.kind_of(given) is not None,
            "folder",
            "be a run folder, a folder of runs, or a page that Equipoise wrote",
            str(given),
        )
        return given
    if given.is_dir() and not (given / "run.toml").exists() and find_runs(given).runs:
        return index(given)
    path = given / "report.html"
    sources = [
        source
        for name in ("run.toml", "summary.json", "rows.jsonl", "parts", "arrays.npz")
        if (source := given / name).exists()
    ]
    if not path.exists() or any(
        source.stat().st_mtime > path.stat().st_mtime for source in sources
    ):
        return report(given)
    return path
