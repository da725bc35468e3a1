"""Render a run folder to `report.html`, one self-contained file, and the sections that it consists
of.

To add a section, write a function from a run to a section and list it in :data:`SECTIONS`, or
register an entry point.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.reporting import (
    accuracy,
    alphas,
    attack_progress,
    attacked,
    certificates,
    mixture_fit,
    page,
    provenance,
    radius_curves,
    sanity_checks,
)
from equipoise.reporting.explorer.data import explorer
from equipoise.reporting.section import RunView, Section, read_run
from equipoise.reporting.title import title

SectionFunction = Callable[[RunView], Section | None]

# Each function returns None for runs that have nothing to show in it. Sections of other packages
# come before the last.
SECTIONS: Registry[SectionFunction] = Registry(
    "equipoise.report_sections",
    "report section",
    {
        "progress": provenance.progress,
        "headline": accuracy.headline,
        "explorer": explorer,
        "promise": mixture_fit.promise,
        "radius-curves": radius_curves.radius_curves,
        "sanity-checks": sanity_checks.sanity_checks,
        "attack-progress": attack_progress.attack_progress,
        "attack-details": attacked.details,
        "attacked-images": attacked.pictures,
        "training": provenance.training,
        "certified": certificates.certified,
        "certified-theorems": certificates.theorems,
        "frontier": certificates.frontier,
        "fit": mixture_fit.fitted,
        "fit-trade-off": mixture_fit.trade_off,
        "alpha": alphas.alpha_sweep,
        "examples": accuracy.examples,
        "margins": accuracy.margins,
        "estimates": certificates.estimates,
        "map-margins": mixture_fit.map_margins,
        "landscape": mixture_fit.landscape,
        "cost": mixture_fit.cost,
        "provenance": provenance.provenance,
    },
)
CONTRADICTION = "whose files agree with one another"


def ordered(sections: Registry[SectionFunction] = SECTIONS) -> list[SectionFunction]:
    """All section functions in the order of the report: built-in ones, external ones,
    provenance."""
    return [sections[name] for name in sections if name != "provenance"] + [sections["provenance"]]


def report(folder: Path | str) -> Path:
    """Write `report.html` and `figures/` into a run folder; that of an unfinished run says how far
    it is.

    The report is a pure function of the folder (`run.toml`, `rows.jsonl`, `summary.json` and
    perhaps `arrays.npz` and runs in subfolders): the same rows give the same bytes. No model is
    loaded, and neither this function nor the report downloads anything.

    Returns:
        The path of the report.
    """
    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    run = read_run(folder)
    path = run.folder / "report.html"
    with files_agree(run.folder):
        shown = [section for function in ordered() if (section := function(run)) is not None]
        shown.sort(key=lambda section: not section.leads)
        page.write(path, page.REPORT, *title(run), shown, figures=run.folder / "figures")
    return path


@contextmanager
def files_agree(folder: Path | str) -> Iterator[None]:
    """Refuse files that are valid one by one but contradict one another, such as a summary without
    its rows."""
    try:
        yield
    except InputError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        place = next(
            (
                frame
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(frame.filename).parent == Path(__file__).parent
            ),
            None,
        )
        where = "" if place is None else f" in {Path(place.filename).name}, line {place.lineno}"
        raise InputError(
            f"{folder} must hold a run {CONTRADICTION}, got one that cannot be shown "
            f"({type(error).__name__}{where})"
        ) from error
