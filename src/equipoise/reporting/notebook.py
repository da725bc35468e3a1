"""Results in a notebook: the tables and figures of their report as a fragment of HTML without
scripts."""

from __future__ import annotations

import os
from pathlib import Path

from equipoise.core.notebook import NotebookResult
from equipoise.reporting.charts import LIGHT
from equipoise.reporting.page import template_environment, to_svg
from equipoise.reporting.render import SECTIONS, ordered
from equipoise.reporting.section import RunView, read_run
from equipoise.reporting.title import title

# The explorer needs a script; what the run was is known in a notebook that ran it.
LEFT_OUT = ("explorer", "provenance")
NOWHERE = Path(os.devnull) / "not kept"  # a folder that cannot exist


def render(result: NotebookResult) -> str:
    """The sections of a result: from its run folder if that is there, else from its summary and
    rows alone."""
    run = read_view(result)
    # A fit that was not kept has no accuracies.
    left_out = {
        id(SECTIONS[name]) for name in (*LEFT_OUT, *(() if run.summary.results else ("headline",)))
    }
    shown = [
        section
        for function in ordered()
        if id(function) not in left_out and (section := function(run)) is not None
    ]
    shown.sort(key=lambda section: not section.leads)
    images = {picture.name: to_svg(picture) for section in shown for picture in section.pictures}
    name, details = title(run)
    environment = template_environment()
    return environment.get_template("notebook.html").render(
        title=name,
        subtitle=details,
        sections=shown,
        images=images,
        light=LIGHT,
        text="" if shown else str(result),
    )


def read_view(result: NotebookResult) -> RunView:
    """The run of a result, without arrays and settings if it was not kept."""
    summary, rows, out = result.notebook_content()
    if (
        out is not None
        and (Path(out) / "summary.json").exists()
        and (Path(out) / "run.toml").exists()
    ):
        return read_run(out)
    return RunView(NOWHERE, {}, {}, summary, list(rows))
