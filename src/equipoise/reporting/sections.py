"""The sections of a report, and the report of a run folder.

To add a section, write a function from a run to a section or None, and list it in :data:`SECTIONS`
or register an entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equipoise.core.registry import Registry
from equipoise.reporting import (
    accuracy,
    attacks,
    certificates,
    fit,
    gallery,
    page,
    provenance,
    training,
    verdict,
)
from equipoise.reporting.run_view import RunView, read_run
from equipoise.reporting.section import Section

SectionFunction = Callable[[RunView], Section | None]

# In the order of a report; sections of other packages come before the last.
SECTIONS: Registry[SectionFunction] = Registry(
    "equipoise.report_sections",
    "report section",
    {
        "verdict": verdict.verdict,
        "alarms": verdict.alarms,
        "accuracy": accuracy.accuracy,
        "fit": fit.fitted,
        "frontier": fit.frontier,
        "certificates": certificates.certified,
        "theorems": certificates.theorems,
        "equal-accuracy": certificates.equal_accuracy,
        "training": training.training,
        "images": gallery.gallery,
        "checks": attacks.checks,
        "attack-progress": attacks.attack_progress,
        "broken-images": attacks.broken_images,
        "margins": attacks.margins,
        "radii": attacks.radii,
        "classes": accuracy.classes,
        "alphas": fit.alphas,
        "map-margins": fit.map_margins,
        "search": fit.landscape,
        "cost": provenance.cost,
        "provenance": provenance.provenance,
    },
)


def sections_of(run: RunView, sections: Registry[SectionFunction] = SECTIONS) -> list[Section]:
    """All sections that have something to show of a run."""
    names = [name for name in sections if name != "provenance"]
    shown = []
    for name in [*names, "provenance"]:
        section = sections[name](run)
        if section is not None:
            shown.append(section)
    return shown


def write_report(folder: Path) -> Path:
    """Write `report.html` and `figures/` into a run folder."""
    run = read_run(folder)
    path = run.folder / "report.html"
    title, facts = provenance.title(run)
    page.write(path, page.REPORT, title, facts, sections_of(run), figures=run.folder / "figures")
    return path
