"""Attacks in detail: how they went on, what broke images, how near the others came, and whether the
attacks can be trusted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from equipoise.core import aggregation, format, stats
from equipoise.core.aggregation import CLEAN
from equipoise.core.radius_curves import RadiusCurve
from equipoise.core.rows import AUDIT, AttackRow
from equipoise.core.text import slug
from equipoise.core.threat import SIGNS
from equipoise.reporting import charts
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import Cell, Figure, Records, Section, Table, cells

MOST_ATTACKS, MOST_STAGES = 4, 10  # shown in figures
KINDS = ("under attack", "clean")
CORRECT = "images classified correctly"
AT_OR_BELOW = "images at or below"


def attack_progress(run: RunView) -> Section | None:
    """Did the attacks end because nothing more could be found?"""
    figures = []
    for attack in run.attacks:
        records: Records = []
        for model, images in run.attacked_images.items():
            for passes, left in _left_by_passes(images, attack):
                record = {"model": run.name(model), "x": passes, "n": left.n}
                records.append(record | charts.fields(left, "y"))
        if records:
            figure = charts.curves(
                f"attack-progress-{slug(attack)[:40]}",
                f"Images that {attack} has not broken after so many passes, with 95 % intervals",
                records,
                run.colours,
                x="passes per image (logarithmic)",
                y=CORRECT,
                logarithmic=True,
                steps=True,
            )
            figures.append(figure)
    text = (
        "A flat end: a longer attack would find little more. A line that still falls asks for a stronger attack. "
        "A pass is one evaluation of the network with its gradient; one without counts a third."
    )
    if not figures:
        return None
    return Section("Attack progress", [text], figures[:MOST_ATTACKS])


def _left_by_passes(
    images: dict[int, list[AttackRow]], attack: str
) -> list[tuple[int, stats.Estimate]]:
    """Passes, and the share of images that are correct after them; what only an audit broke is
    left."""
    broken, last = [], 0
    for rows in images.values():
        for row in rows:
            if row.attack != attack:
                continue
            if row.share_correct is not None:
                return []
            passes = 0 if row.broken_by == CLEAN else row.attack_passes or 0
            last = max(last, passes)
            if not row.correct and not row.only_audit_broke:
                broken.append(passes)
    points: list[tuple[int, stats.Estimate]] = []
    if last == 0:  # rows without passes
        return points
    at = sorted({0, last, *broken})
    for position in charts.thin(len(at)):
        left = len(images) - int((np.array(broken) <= at[position]).sum())
        points.append((at[position], stats.clopper_pearson(left, len(images))))
    return points


def broken_images(run: RunView) -> Section | None:
    """Which attack, and which stage of a suite, broke how many images."""
    counts = aggregation.broken_by(run.rows)
    if not counts:
        return None
    records: Records = []
    totals: dict[str, int] = defaultdict(int)
    for item in counts:
        stage = named_stage(item.attack, item.stage)
        totals[stage] += item.count
        records.append({"row": stage, "model": run.name(item.model), "count": item.count})
    rows = sorted(totals, key=lambda stage: -totals[stage])[:MOST_STAGES]
    shown = [record for record in records if record["row"] in rows]
    title = "Images that a stage of an attack broke; the stages that broke most"
    figure = charts.bars("broken-by", title, shown, run.colours, x="images", rows=rows)
    text = [
        "An image counts as broken if it is classified correctly clean and misclassified under the attack; the "
        "first stage that breaks an image is counted.",
    ]
    tables = []
    if run.summary.as_bytes:
        tables.append(_as_bytes(run))
    return Section("What broke images", text, [figure], tables)


def _as_bytes(run: RunView) -> Table:
    rows = []
    for item in run.summary.as_bytes:
        share = Cell(format.percent(item.value), format.bounds(item))
        rows.append(cells(run.name(item.model), item.metric, share, str(item.n)))
    caption = "Broken images that are still misclassified after rounding to bytes."
    return Table(caption, ["model", "attack", "still misclassified", "n"], rows, collapsed=True)


def margins(run: RunView) -> Section | None:
    """How near to being broken are the images that were not broken?"""
    records: Records = []
    for model, images in run.attacked_images.items():
        clean, attacked = _margins_of(images)
        records += charts.cumulative(run.name(model), attacked, KINDS[0])
        records += charts.cumulative(run.name(model), clean, KINDS[1])
    if not records:
        return None
    figure = charts.curves(
        "margins",
        "Images at or below each margin, under attack and (dashed) clean",
        records,
        run.colours,
        x="margin: true class minus best other",
        y=AT_OR_BELOW,
        steps=True,
        dashes=KINDS,
        rule=0.0,
    )
    text = (
        "The margin is the probability of the true class minus the largest other one. At 0 a line shows the share "
        "that is misclassified; right of it, how far the others are from it."
    )
    return Section("Margins", [text], [figure])


def _margins_of(images: dict[int, list[AttackRow]]) -> tuple[list[float], list[float]]:
    """Margins of clean images, and the smallest of each image."""
    clean, attacked = [], []
    for rows in images.values():
        known = [row.margin for row in rows if row.margin is not None]
        if rows[0].margin is not None and len(known) > 1:
            clean.append(rows[0].margin)
            attacked.append(min(known))
    return clean, attacked


def radii(run: RunView) -> Section | None:
    """Accuracy against the radius of the attack, from the smallest perturbations found."""
    curves = run.summary.radius_curves
    if not curves:
        return None
    names = [run.name(curve.model) for curve in curves]
    largest = format.radius(curves[0].points[-1].radius, curves[0].norm)
    text = (
        "The radius of an image is the norm of the smallest perturbation that was found to change its class: 0 if "
        f"it is misclassified already, none if nothing up to {largest} changes it. Radii are upper bounds: a "
        "stronger search can only lower the curve."
    )
    rows = []
    for name, curve in zip(names, curves, strict=True):
        first, median = Cell(name, colour=run.colours[name]), format.median_radius(curve)
        rows.append(cells(first, median, str(curve.wrong), str(curve.broken), str(curve.survived)))
    table = Table(
        "Median radius (half of the images are broken within it), and images by their radius.",
        ["model", "median", "radius 0", "broken", f"none up to {largest}"],
        rows,
    )
    return Section(
        "Accuracy against radius", [text], [radius_figure(curves, names, run.colours)], [table]
    )


def radius_figure(
    curves: Sequence[RadiusCurve], names: Sequence[str], palette: charts.Palette
) -> Figure:
    """The curves of several models, which have one norm."""
    norm, unit, written = curves[0].norm, 1, "[0, 1] pixels"
    if norm == "linf":
        unit, written = 255, "1/255 of the range"
    records: Records = []
    for name, curve in zip(names, curves, strict=True):
        for point in curve.points:
            x = round(unit * point.radius, 6)
            records.append({"model": name, "x": x, **charts.fields(point, "y"), "n": curve.n})
    return charts.curves(
        "radius-curves",
        "Accuracy against the radius of the attack, with 95 % intervals",
        records,
        palette,
        x=f"{SIGNS[norm]} radius, in {written}",
        y=CORRECT,
    )


def checks(run: RunView) -> Section | None:
    """Can the attacks be trusted? Sanity checks and audits."""
    performed = run.summary.sanity_checks
    failed, passed = _by_meaning(run, alarm=True), _by_meaning(run, alarm=False)
    text, tables = [], []
    if performed:
        count = sum(check.alarm for check in performed)
        text.append(f"{len(performed) - count} of {len(performed)} checks raise no alarm.")
    covered = format.covered_by_adaptive(performed)
    if covered:
        names = ", ".join(sorted(map(run.name, covered)))
        text.append(
            f"Alarms for {names} are why adaptive attacks, which use the structure of the mixture, were run too. "
            "These raise no alarm, and robust accuracy counts them."
        )
    head = ["check", "what it means", "value"]
    if failed:
        tables.append(Table("Checks with an alarm, and what to do.", head, failed, is_text=True))
    if passed:
        tables.append(Table("Checks without an alarm.", head, passed, is_text=True, collapsed=True))
    if run.summary.audits:
        tables.append(_audit_table(run))
    if not tables:
        return None
    return Section("Can the attacks be trusted?", text, tables=tables)


def _by_meaning(run: RunView, *, alarm: bool) -> list[list[Cell]]:
    """A row for checks that mean the same, with all their values."""
    values: dict[tuple[str, str], list[str]] = {}
    for check in run.summary.sanity_checks:
        if check.alarm == alarm:
            meaning = f"{check.explanation}. {check.advice or ''}".strip()
            value = f"{check.value:.2g} ({run.name(check.model)}, {check.attack})"
            values.setdefault((check.name, meaning), []).append(value)
    return [cells(*key, "; ".join(own)) for key, own in values.items()]


def _audit_table(run: RunView) -> Table:
    rows = []
    for audit in run.summary.audits:
        model = Cell(run.name(audit.model), f"{audit.attack}, audited by {audit.stronger}")
        advice = f"run --attack {audit.stronger}" if audit.is_poor else ""
        gap = Cell(f"{format.number(100 * audit.gap, 1)} points", advice)
        survivors = f"{audit.audited} of {audit.survivors}"
        rows.append(cells(model, survivors, str(audit.broken), gap, str(audit.passes)))
    caption = (
        "Audits: a stronger attack on a random sample of the survivors. What it broke counts in robust accuracy, "
        "not in the accuracy under the attack. The gap is the most by which that accuracy may lie above the one "
        "under the stronger attack, with 95 % confidence (exact, hypergeometric)."
    )
    return Table(caption, ["model", "survivors audited", "broken", "gap", "passes"], rows)


def stage_of(row: AttackRow) -> str:
    """The attack, and for a suite its stage, that broke an image."""
    return named_stage(row.attack, (row.broken_by or "").removeprefix(AUDIT))


def named_stage(attack: str, stage: str) -> str:
    """A stage of an attack, literally; an attack without stages by its name."""
    if stage in ("", attack):
        return format.literal(attack)
    return format.literal(f"{attack}: {stage}")
