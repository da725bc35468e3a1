"""Results in a notebook: the sections of their report as a fragment of HTML without scripts."""

from __future__ import annotations

import html
import os
from pathlib import Path

from equipoise.core.notebook import NotebookResult
from equipoise.reporting import missing_packages
from equipoise.reporting.run_view import RunView, read_run

# The gallery needs a script; what the run was is known in a notebook that ran it.
LEFT_OUT = ("Images", "How to repeat it")
NOWHERE = Path(os.devnull) / "not kept"  # a folder that cannot exist


def render(result: NotebookResult) -> str:
    """The sections of a result: from its run folder if that is there, else from its summary and
    rows alone. The text of a result that has none, or where figures cannot be drawn."""
    run = read_view(result)
    text = f"<pre>{html.escape(str(result))}</pre>"
    if missing_packages() or not (run.summary.results or run.summary.fit):
        return text
    from equipoise.reporting import charts, page, provenance, sections

    shown = [section for section in sections.sections_of(run) if section.title not in LEFT_OUT]
    title, facts = provenance.title(run)
    template = page.templates().get_template("notebook.html")
    return template.render(title=title, facts=facts, sections=shown, light=charts.LIGHT)


def read_view(result: NotebookResult) -> RunView:
    """The run of a result, without arrays and settings if it was not kept."""
    summary, rows, out = result.notebook_content()
    if out is not None and (Path(out) / "summary.json").exists():
        return read_run(out)
    return RunView(NOWHERE, {}, {}, summary, list(rows))
