"""The title of a report: what was done, on which data, how many images, under which threat, and when."""

from __future__ import annotations

from collections.abc import Mapping

from equipoise.core import format
from equipoise.reporting.section import RunView

WHAT = {"evaluate": "Evaluation", "fit": "Fitted mixture", "certify": "Certificates", "train": "Training",
        "demo": "Demo", "compare-rules": "Rules for mixing"}
NAMED, SHORT = 3, 40  # references in a title, and characters that one may have


def title(run: RunView) -> tuple[str, str]:
    """The title, and the line above it; without anything better the name of the folder."""
    study = run.identity.get("study")
    what = f"Study {study}" if isinstance(study, str) else WHAT.get(run.summary.command, "")
    references = run.settings.get("references")
    listed = [name for name in references if isinstance(name, str) and name != "model"] if isinstance(
        references, list) else []
    if what and listed:
        short = [name if len(name) <= SHORT else own for name, own in format.short_names(listed).items()]
        named = short if len(short) <= NAMED else [*short[:NAMED], f"{len(short) - NAMED} more"]
        what += f" of {', '.join(named[:-1])}{' and ' * (len(named) > 1)}{named[-1]}"
    folder = run.folder.resolve().name
    parts = [f"Equipoise · {run.summary.command}", *_data(run), *([str(run.threat)] if run.threat else []),
             str(run.settings.get("date", "")), folder if what else ""]
    return what or folder, " · ".join(part for part in parts if part)


def _data(run: RunView) -> list[str]:
    data = run.identity.get("data")
    if not isinstance(data, Mapping):
        return []
    name = " ".join(str(data[key]) for key in ("name", "split") if data.get(key))
    return [name, f"n = {data['count']}"] if "count" in data else [name]
