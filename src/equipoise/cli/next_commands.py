"""The command that usually follows another, as it would be typed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from equipoise.cli.options import written
from equipoise.core import format
from equipoise.core.results import Summary
from equipoise.core.settings import Settings
from equipoise.core.threat import ThreatSettings
from equipoise.data import DataSettings
from equipoise.models import LoadOptions

STRONG = "standard"  # the attack to which a doubtful accuracy is put
STRONGEST = {STRONG, "autoattack"}  # the names of that attack
RANDOMIZED = "rand"  # the same for a model whose passes differ
FEW, MANY = 100, 1000  # images to be certified, or attacked


def after_evaluate(summary: Summary, out: Path, attack: str) -> list[object]:
    """A stronger attack where it was advised and can lower an accuracy, else the report.

    `attack` is what was typed, one name or several.
    """
    is_random = any(check.alarm and check.name == "randomness" for check in summary.sanity_checks)
    covered = format.covered_by_adaptive(summary.sanity_checks)
    nothing_left = {
        result.model for result in summary.results if result.metric == "worst" and result.value == 0
    }
    is_doubtful = any(audit.is_poor for audit in summary.audits) or any(
        check.alarm
        and check.model not in covered | nothing_left
        and f"--attack {STRONG}" in (check.advice or "")
        for check in summary.sanity_checks
    )
    if not is_random and (
        not is_doubtful or not STRONGEST.isdisjoint(name.strip() for name in attack.split(","))
    ):
        return ["open", out]
    stronger = RANDOMIZED if is_random else STRONG
    same = without(sys.argv[1:], "--attack", "--audit", "--out", "--steps", "--restarts")
    return [*same, "--attack", stronger, "--out", f"{out}-{stronger}"]


def after_fit(
    out: Path, data: DataSettings, threat: ThreatSettings, load: LoadOptions, used_images: bool
) -> list[object]:
    """An evaluation of the mixture, on images that the fit did not use if it used some but not
    all."""
    other: list[object] = []
    if used_images:
        if data.start == 0 and data.count is None:
            return ["open", out]
        # The images before those of the fit, or else those after them.
        other = ["--count", min(data.start, MANY)] if data.start else ["--start", data.count]
    code = ["--allow-code"] if load.allow_code else []
    images = typed(data, leave_out=("start", "count", "every"))
    return [
        "evaluate",
        f"mixture:{out}",
        *images,
        *other,
        *typed(threat),
        *code,
        "--out",
        f"{out}-evaluation",
    ]


def after_train(checkpoint: Path, data: DataSettings, objective: Settings) -> list[object]:
    """Certificates for training with noise, else an evaluation under the attack that it was trained
    against.

    Images from files have no test split, so that other ones are the user's to name.
    """
    values, out = objective.to_dict(), checkpoint.parent
    if ":" in data.data:
        return ["open", out]
    images = typed(data, leave_out=("start", "count", "every", "split"))
    if "sigma" in values:
        return [
            "certify",
            checkpoint,
            "--sigma",
            values["sigma"],
            *images,
            "--count",
            FEW,
            "--out",
            f"{out}-certificates",
        ]
    threat = typed(ThreatSettings.select(values)) if "eps" in values else []
    return [
        "evaluate",
        checkpoint,
        *images,
        "--count",
        _many(data),
        *threat,
        "--out",
        f"{out}-evaluation",
    ]


def after_gate(
    out: Path, accurate: str, robust: str, data: DataSettings, objective: Settings
) -> list[object]:
    """A fit that puts the gate over a mixture, on images of the test split."""
    if ":" in data.data:
        return ["open", out]
    threat = typed(ThreatSettings.select(objective.to_dict()))
    return [
        "fit",
        "--accurate",
        accurate,
        "--robust",
        robust,
        "--gate",
        out,
        *typed(data, leave_out=("start", "count", "every", "split")),
        "--start",
        _many(data),
        "--count",
        _many(data),
        *threat,
        "--out",
        f"{out}-mixture",
    ]


def _many(data: DataSettings) -> int:
    """As many images as the test split of a data set has twice."""
    return FEW if data.data == "digits" else MANY


def typed(settings: Settings, leave_out: Sequence[str] = ()) -> list[object]:
    """Settings that differ from their defaults, as options."""
    arguments: list[object] = []
    for field in fields(settings):
        value: Any = getattr(settings, field.name)
        if (
            field.name not in leave_out
            and "help" in field.metadata
            and value is not None
            and (field.default is MISSING or value != field.default)
        ):
            arguments += [
                f"--{field.name.replace('_', '-')}",
                written(value) if isinstance(value, float) else value,
            ]
    return arguments


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    left, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in options:
            left.append(argument)
        skip = argument in options
    return left
