"""What a run was, what a prediction costs, and everything needed to repeat the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from equipoise.core import format
from equipoise.reporting.page import joined
from equipoise.reporting.run_view import MIXED, RunView
from equipoise.reporting.section import Cell, Section, Table, cells

COMMANDS = {
    "evaluate": "Evaluation",
    "fit": "Fitted mixture",
    "certify": "Certificates",
    "train": "Training",
    "demo": "Demo",
}
NAMED = 3  # references in a title


def title(run: RunView) -> tuple[str, str]:
    """The title of a report, and the facts below it; without anything better the name of the
    folder."""
    folder = run.folder.resolve().name
    command, count = run.summary.command, run.data.get("count")
    facts = [f"Equipoise {command}", run.data_name, "" if count is None else f"n = {count}"]
    facts += [str(run.threat or ""), str(run.settings.get("date", ""))]
    if command not in COMMANDS:
        return folder, joined(facts)
    what = COMMANDS[command]
    references = run.settings.get("references")
    if isinstance(references, list):
        short = list(format.short_names(str(name) for name in references).values())
        if len(short) > NAMED:
            short = [*short[:NAMED], f"{len(short) - NAMED} more"]
        what += f" of {', '.join(short)}"
    if command == "train":
        what += f" of {run.setting('arch')} ({run.setting('objective', 'name')})"
    return what, joined([*facts, folder])


def cost(run: RunView) -> Section | None:
    """Parameters and operations of a prediction."""
    costs = run.summary.costs
    if not costs:
        return None
    rows, text = [], []
    for item in costs:
        name = run.name(item.model).replace(f"{MIXED}, ", "mixture, ")
        first = Cell(name, colour=run.colours.get(name, ""))
        rows.append(cells(first, _large(item.parameters), _large(item.flops)))
        if item.accurate_share is not None:
            text.append(
                f"The {name} runs its robust model first, and its accurate model only where that can "
                f"still change the prediction: for {format.percent(item.accurate_share)} of the clean images."
            )
        if item.robust_passes is not None:
            text.append(
                f"It runs {item.robust_passes:.2f} views of the robust model per clean image."
            )
    caption = (
        "Operations are those of convolutions and matrix products for one image; a multiplication with its "
        "addition counts as two. A dash: the model computes outside of torch."
    )
    table = Table(caption, ["model", "parameters", "operations"], rows)
    return Section("Cost of a prediction", text, tables=[table])


def _large(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1e9:
        return f"{value / 1e9:.2f} G"
    return f"{value / 1e6:.2f} M"


def provenance(run: RunView) -> Section:
    """The command, the settings, and the identity of the run."""
    settings: dict[str, Any] = {"data": run.data_name, "images": run.data.get("count")}
    settings |= {
        "threat": str(run.threat or ""),
        "attacks": run.attacks,
        "seed": run.setting("seed"),
    }
    if run.summary.command == "train":
        settings |= {"arch": run.setting("arch"), "objective": run.setting("objective")}
        settings |= {"plan": run.setting("plan")}
    for key, value in run.settings.items():
        if key not in ("command", "data"):
            settings[key] = value
    tables = [_table("Settings of the run.", settings)]
    caption = "The identity of the run: two runs that agree in all of it are the same run."
    tables.append(_table(caption, run.identity, collapsed=True))
    command = run.settings.get("command", "")
    code = str(command)
    if isinstance(command, list):
        code = shlex.join(map(str, command))
    text = f"This page was made from the run folder alone. The run took {run.summary.seconds:g} seconds."
    return Section("How to repeat it", [text], tables=tables, code=code)


def _table(caption: str, values: Mapping[str, Any], *, collapsed: bool = False) -> Table:
    rows = []
    for key, value in flatten(values).items():
        if value:
            rows.append(cells(key, value))
    return Table(caption, ["setting", "value"], rows, is_text=True, collapsed=collapsed)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted keys, with numbers for the items of a list of tables."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            value = {str(number): item for number, item in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            flat[prefix + key] = ", ".join(map(written, value))
        elif key == "eps" and table.get("norm") == "linf" and _is_in_bytes(value):
            flat[prefix + key] = format.radius(value, "linf")
        else:
            flat[prefix + key] = written(value)
    return flat


def _is_in_bytes(value: Any) -> bool:
    """Whether an eps is a number of halves of 1/255 that three digits show exactly."""
    if not isinstance(value, float):
        return False
    steps = 255 * value
    return abs(2 * steps - round(2 * steps)) < 1e-6 and abs(steps - float(f"{steps:.3g}")) < 1e-6


def written(value: Any) -> str:
    """A value as a user would type it."""
    words = {"True": "yes", "False": "no", "None": ""}
    return words.get(str(value), str(value))
