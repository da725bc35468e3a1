"""The title of a report: what was done, on which data, how many images, under which threat, and
when."""

from __future__ import annotations

from collections.abc import Mapping

from equipoise.core import format
from equipoise.core.rows import certificates
from equipoise.reporting.section import RunView

WHAT = {
    "evaluate": "Evaluation",
    "fit": "Fitted mixture",
    "certify": "Certificates",
    "train": "Training",
    "demo": "Demo",
}
NAMED = 3  # references in a title


def title(run: RunView) -> tuple[str, str]:
    """The title, and the line above it; without anything better the name of the folder."""
    what = WHAT.get(run.summary.command, "")
    references = run.settings.get("references")
    listed = (
        [name for name in references if isinstance(name, str) and name != "model"]
        if isinstance(references, list)
        else []
    )
    if what and listed:
        short = list(format.short_names(listed).values())
        named = short if len(short) <= NAMED else [*short[:NAMED], f"{len(short) - NAMED} more"]
        what += f" of {', '.join(named[:-1])}{' and ' * (len(named) > 1)}{named[-1]}"
    what += _details(run) if what else ""
    folder = run.folder.resolve().name
    parts = [
        f"Equipoise · {run.summary.command}",
        *_data(run),
        *([str(run.threat)] if run.threat else []),
        str(run.settings.get("date", "")),
        folder if what else "",
    ]
    return what or folder, " · ".join(part for part in parts if part)


def _details(run: RunView) -> str:
    """Of certificates the noise, of a training run the architecture and the objective."""
    sigmas = (
        sorted({row.sigma for row in certificates(run.rows)})
        if run.summary.command == "certify"
        else []
    )
    objective, arch = run.identity.get("objective"), run.identity.get("arch")
    if run.summary.command == "train" and isinstance(arch, str):
        name = objective.get("name") if isinstance(objective, Mapping) else None
        return f" of {arch}{f' ({name})' if isinstance(name, str) else ''}"
    return f", smoothed with σ = {', '.join(f'{sigma:g}' for sigma in sigmas)}" if sigmas else ""


def data_name(run: RunView) -> str:
    """The data set and its split, if the run records them."""
    return " ".join(str(run.data[key]) for key in ("name", "split") if run.data.get(key))


def _data(run: RunView) -> list[str]:
    data = run.data
    if not data:
        return []
    return [data_name(run), f"n = {data['count']}"] if "count" in data else [data_name(run)]
