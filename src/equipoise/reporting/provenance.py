"""How a run was made: the training curves, and everything needed to repeat it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN
from equipoise.core.rows import AttackRow, EpochRow
from equipoise.reporting.charts import CORRECT, Chart, Line, Panel
from equipoise.reporting.section import MISSING, SAME_NUMBERS, Cell, RunView, Section, Table

# Label, colour and line style of every accuracy.
CURVES = {
    "accuracy": ("training", "muted", "--"),
    "clean": ("held out, clean", "accurate", "-"),
    "attacked": ("held out, under PGD", "robust", "-"),
    "noisy": ("held out, under noise", "mixed", "-"),
}


UNFINISHED, GO_ON = "This run is not finished", "Repeat the command to go on."


def training(run: RunView) -> Section | None:
    """Loss and accuracies of every epoch."""
    rows = [row for row in run.rows if isinstance(row, EpochRow)]
    if not rows:
        return None
    n, best = next((result.n for result in run.summary.results), 0), run.summary.best_epoch
    prose = [
        "Training accuracy is that of the current weights on the inputs that the objective trains on. Held-out "
        f"images{f' (n = {n})' if n else ''} are never trained on; they are classified by the weights that are "
        f"saved.{' Bands are exact 95 % intervals.' if n else ''}"
    ]
    if best is not None and best >= 0 and n:
        prose.insert(
            0,
            f"The best of {len(rows)} epochs is epoch {best + 1}. It was selected on the held-out images, "
            "so its accuracy on them is optimistic; evaluate it on test images.",
        )
    accuracies = [{**row.validation, "accuracy": row.accuracy} for row in rows]
    names = [name for name in CURVES if any(name in own for own in accuracies)]
    marker = "o" if len(rows) < 30 else ""
    loss = Line(
        x=[row.index + 1 for row in rows], y=[row.loss for row in rows], color="ink", marker=marker
    )
    rate = Line(
        x=[row.index + 1 for row in rows], y=[row.lr for row in rows], color="ink", marker=marker
    )
    lines = [_accuracy_line(rows, accuracies, name, n, marker) for name in names]
    ticks = {
        float(epoch): str(epoch) for epoch in range(1, len(rows) + 1, math.ceil(len(rows) / 8))
    }
    chart = Chart(
        "training",
        f"Loss, accuracy and learning rate over {len(rows)} epochs of training",
        [
            Panel([loss], y_label="loss", x_ticks=ticks),
            Panel(lines, y_label=CORRECT, x_ticks=ticks),
            Panel([rate], y_label="learning rate", x_ticks=ticks),
        ],
        x_label="epoch",
        height=6.0,
    )
    body = [
        [
            Cell(str(row.index + 1)),
            Cell(f"{row.loss:.4f}"),
            Cell(f"{row.lr:.4g}"),
            *(Cell(format.percent(own[name])) if name in own else MISSING for name in names),
            Cell(f"{row.images_per_second:.0f}"),
        ]
        for row, own in zip(rows, accuracies, strict=True)
    ]
    head = [
        "epoch",
        "loss",
        "learning rate",
        *(CURVES[name][0] for name in names),
        "images per second",
    ]
    return Section(
        "Training", prose, [Table(f"{SAME_NUMBERS}.", head, body, collapsed=True)], [chart]
    )


def _accuracy_line(
    rows: Sequence[EpochRow],
    accuracies: Sequence[Mapping[str, float]],
    name: str,
    n: int,
    marker: str,
) -> Line:
    """One accuracy over the epochs; those on held-out images have intervals."""
    known = [
        (row.index + 1, own[name]) for row, own in zip(rows, accuracies, strict=True) if name in own
    ]
    label, color, linestyle = CURVES[name]
    shares = [stats.of_share(share, n) for _, share in known] if n and name != "accuracy" else []
    return Line(
        x=[epoch for epoch, _ in known],
        y=[100 * share for _, share in known],
        color=color,
        label=label,
        low=[100 * share.low for share in shares],
        high=[100 * share.high for share in shares],
        linestyle=linestyle,
        marker=marker,
    )


def progress(run: RunView) -> Section | None:
    """How far a run is that is not finished."""
    if run.finished:
        return None
    if run.summary.command == "train":
        return Section(UNFINISHED, [_epochs_so_far(run), GO_ON])
    total, attacks = run.data.get("count"), run.identity.get("attacks")
    planned = (
        {(model, attack): 0 for model, own in attacks.items() for attack in own}
        if isinstance(attacks, Mapping)
        else {}
    )
    counts = {**planned, **Counter((row.model, row.attack) for row in run.rows)}
    body = [
        [Cell(run.name(model)), Cell(attack), Cell(f"{count} of {total}" if total else str(count))]
        for (model, attack), count in counts.items()
    ]
    prose = ["All figures below are of the images measured so far."]
    if not run.rows:
        prose = ["Nothing has been measured yet."]
    elif planned and min(counts.values()) == total:
        prose = [
            "All images are measured. What is left is the work after the last attack, such as sanity checks, and "
            "the summary of the run."
        ]
    elif any(isinstance(row, AttackRow) and row.attack != CLEAN for row in run.rows):
        prose.append(
            "A suite of attacks decides the images that it breaks first, so an attacked accuracy is too low "
            "until it ends."
        )
    return Section(
        UNFINISHED,
        [" ".join([*prose, GO_ON])],
        [Table("Images measured so far.", ["model", "attack", "images"], body, is_text=True)]
        if body
        else [],
    )


def _epochs_so_far(run: RunView) -> str:
    plan, done = run.identity.get("plan"), sum(isinstance(row, EpochRow) for row in run.rows)
    total = plan.get("epochs") if isinstance(plan, Mapping) else None
    if done == total:
        return f"All {done} epochs are done. What is left is the summary of the run."
    return f"{done}{'' if total is None else f' of {total}'} epochs are done; all figures below are of them."


def provenance(run: RunView) -> Section:
    """Identity and settings from `run.toml`, and the command that repeats the run."""
    start = "" if run.summary.command == "train" else " since it was last started"
    prose = [
        "Two runs with the same identity are the same run; settings, such as versions, may differ. This report "
        f"was made from the run folder alone. The run took {run.summary.seconds:g} seconds{start}."
    ]
    settings = {
        **_main_settings(run),
        **{key: value for key, value in run.settings.items() if key not in ("command", "data")},
    }
    parts = (
        ("Settings of the run.", "setting", settings, False),
        ("Everything that makes two runs the same run.", "identity", run.identity, True),
    )
    tables = [
        Table(
            caption,
            [head, "value"],
            [[Cell(key), Cell(value)] for key, value in flat.items()],
            is_text=True,
            collapsed=folded,
        )
        for caption, head, values, folded in parts
        if (flat := flatten(values))
    ]
    command = run.settings.get("command", "")
    code = shlex.join(map(str, command)) if isinstance(command, list) else str(command)
    return Section("Provenance", prose, tables, code=code)


def _main_settings(run: RunView) -> dict[str, Any]:
    """What a reader asks first: data, threat, attacks and seed."""
    data, attacks = run.data, run.attacks
    main = {
        "data": " ".join(str(data[key]) for key in ("name", "split") if data.get(key)) or None,
        "images": data.get("count"),
        "threat": None if run.threat is None else str(run.threat),
        "attacks": attacks or None,
        "seed": run.identity.get("seed"),
    }
    return {key: value for key, value in main.items() if value is not None}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted keys, with numbers for the items of a list of tables; other lists
    with commas."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            flat |= flatten(
                {str(number): item for number, item in enumerate(value, start=1)}, f"{prefix}{key}."
            )
        else:
            in_bytes = key == "eps" and table.get("norm") == "linf" and _is_byte_fraction(value)
            flat[prefix + key] = (
                ", ".join(map(_written, value))
                if isinstance(value, list)
                else (format.radius(value, "linf") if in_bytes else _written(value))
            )
    return flat


def _is_byte_fraction(value: Any) -> bool:
    """Whether an eps is a number of halves of 1/255 that three digits show exactly."""
    return (
        isinstance(value, float)
        and abs(510 * value - round(510 * value)) < 1e-6
        and abs(255 * value - float(f"{255 * value:.3g}")) < 1e-6
    )


def _written(value: Any) -> str:
    """A value as a user would type it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
