"""Signs that an attack was too weak, what they mean, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from equipoise.core import format
from equipoise.core.results import SanityCheck
from equipoise.reporting.section import Cell, RunView, Section, Table


def sanity_checks(run: RunView) -> Section | None:
    """Signs that an attack was too weak, or that a model masks its gradients; alarms first."""
    checks = sorted(
        run.summary.sanity_checks, key=lambda check: (check.model, check.attack, check.name)
    )
    if not checks:
        return None
    alarms = [check for check in checks if check.alarm]
    names = sorted(f"{check.name} ({run.name(check.model)}, {check.attack})" for check in alarms)
    prose = [
        "No check raises an alarm." if not alarms else f"Alarms: {'; '.join(names)}.",
        "An attacked accuracy is only as reliable as the attack. These checks, on the first images of the run, "
        "show when an attacked accuracy may be overstated.",
    ]
    explained = format.covered_by_adaptive(checks)
    if explained:
        prose.append(
            f"Alarms for {', '.join(sorted(map(run.name, explained)))} are the reason for also running "
            "adaptive attacks, which use the structure of the mixture. Adaptive attacks raise no alarm, "
            "and the worst case includes them."
        )
    if alarms and not explained:
        prose.append(
            "Until these alarms are explained, read the attacked accuracy as an upper bound, and do what the "
            "table says."
        )
    tables = []
    for alarm, caption in (
        (True, "Checks with an alarm, and what to do."),
        (False, "Checks without an alarm."),
    ):
        grouped: dict[tuple[str, str], list[SanityCheck]] = defaultdict(list)
        for check in (check for check in checks if check.alarm == alarm):
            grouped[check.name, f"{check.explanation}. {check.advice or ''}".strip()].append(check)
        body = [
            [Cell(name), Cell(meaning), Cell(_values(own), _models(run, own))]
            for (name, meaning), own in grouped.items()
        ]
        if body:
            tables.append(
                Table(
                    caption,
                    ["check", "what it measures" + ", and what to do" * alarm, "value"],
                    body,
                    is_text=True,
                    collapsed=not alarm,
                )
            )
    return Section("Sanity checks", prose, tables)


def _values(checks: Sequence[SanityCheck]) -> str:
    low, high = (f"{end(check.value for check in checks):.2g}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _models(run: RunView, checks: Sequence[SanityCheck]) -> str:
    """The models and attacks of checks with one meaning."""
    attacks: dict[str, list[str]] = defaultdict(list)
    for check in checks:
        attacks[check.model].append(check.attack)
    return "; ".join(f"{run.name(model)}: {', '.join(own)}" for model, own in attacks.items())
