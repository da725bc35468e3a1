"""Results in a notebook: the sections of their report as a fragment of HTML without scripts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from equipoise.core.notebook import NotebookResult
from equipoise.reporting import charts, page, provenance
from equipoise.reporting.run_view import RunView, read_run
from equipoise.reporting.section import Section
from equipoise.reporting.sections import sections_of

# The gallery needs a script; what the run was is known in a notebook that ran it.
LEFT_OUT = ("Images", "How to repeat it")
NOWHERE = Path(os.devnull) / "not kept"  # a folder that cannot exist


def render(result: NotebookResult) -> str:
    """The sections of a result: from its run folder if that is there, else from its summary and
    rows alone."""
    run = read_view(result)
    shown: Sequence[Section] = []
    if run.summary.results or run.summary.fit is not None:
        shown = [section for section in sections_of(run) if section.title not in LEFT_OUT]
    title, facts = provenance.title(run)
    template = page.templates().get_template("notebook.html")
    return template.render(
        title=title,
        facts=facts,
        sections=shown,
        light=charts.LIGHT,
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
