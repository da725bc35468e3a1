"""Audits: how far the accuracy under an attack may lie above that under a stronger one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from equipoise.core import stats
from equipoise.core.audits import Audit
from equipoise.core.records import Run
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow, Row
from equipoise.evaluation.job import Job

AUDITED = "fast"  # the attack that is audited
COUNT = 64  # images in a sample, if not given


def audit_results(
    jobs: Sequence[Job], rows: Sequence[Row], seconds: Mapping[str, float | None], run: Run
) -> list[Audit]:
    """The audit of every job that has one, from its rows.

    `seconds` are by job, None where an earlier start has audited, too; a finished run that is
    opened again keeps those it has.
    """
    known = read_summary(run.folder).audits if (run.folder / "summary.json").exists() else ()
    audits = []
    for job in jobs:
        own = [row for row in rows if isinstance(row, AttackRow) and row.key == job.key(row.index)]
        if job.audit is None or not own:
            continue
        audited = [row for row in own if row.audit_passes is not None]
        broken, own_seconds = sum(not row.correct for row in audited), seconds[str(job)]
        survivors = sum(row.correct for row in own) + broken
        most = stats.hypergeometric_upper(broken, len(audited), survivors)
        audit = Audit(
            model=job.name,
            attack=job.attack_name,
            stronger=job.audit.name,
            n=len(own),
            survivors=survivors,
            audited=len(audited),
            broken=broken,
            excess=(most - broken) / len(own),
            passes=sum(row.audit_passes or 0 for row in audited),
            seconds=None if own_seconds is None else round(own_seconds, 1),
        )
        audits.append(
            next((old for old in known if replace(old, seconds=audit.seconds) == audit), audit)
        )
    return audits
