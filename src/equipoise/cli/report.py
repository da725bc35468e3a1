"""`equipoise report`: tables and figures of a run on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise import reporting as room


def report(folder: Annotated[Path, typer.Argument(help="A finished run folder.")]) -> None:
    """Write report.html into a run folder."""
    typer.echo(str(room.write(folder)))
