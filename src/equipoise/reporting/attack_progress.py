"""How many images stand after each attack and stage of an evaluation, and after how many passes of
each attack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN, base_models_first
from equipoise.core.rows import AUDIT, AttackRow
from equipoise.reporting.charts import CORRECT, Chart, Line, Panel, model_colors
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table

COMMANDS = ("evaluate", "demo")
MOST_MODELS, MOST_ATTACKS = 6, 4  # shown
Attacks = dict[str, dict[int, AttackRow]]  # attack → image → row


@dataclass(frozen=True)
class StandingCount:
    """What stands after one stage: the attack and, of a suite whose rows have passes, the stage."""

    attack: str
    stage: str
    standing: int
    n: int


def attack_progress(run: RunView) -> Section | None:
    """Images that stand after each attack of the list, and within each attack after each number of
    passes."""
    tables = {
        model: own for model, own in list(_rows_by_model(run).items())[:MOST_MODELS] if len(own) > 1
    }
    steps = {model: standing(own, _order(run, model, own)) for model, own in tables.items()}
    if (
        run.summary.command not in COMMANDS or max(map(len, steps.values()), default=0) < 3
    ):  # nothing but one attack
        return None
    prose = [
        "An image stands if it is classified correctly without an attack and under every attack up to this one. "
        "Every attack of the list is run on all images; the stages of a suite only on those that still stand. An "
        "attack that breaks nothing more adds no evidence; one late in the list that still breaks many suggests "
        "that a stronger attack would break more."
    ]
    charts = [chart] if (chart := _passes_chart(run, tables)) is not None else []
    if charts:
        prose.append(
            "The curves show each attack alone. A pass is one evaluation of the network with its gradient, "
            "without a gradient it counts a third; successes are noticed every 8 to 20 passes, of attacks "
            "with thousands of passes every 80 to 120. Bands are exact 95 % intervals."
        )
    return Section("Attack progress", prose, [_table(steps)], charts)


def _rows_by_model(run: RunView) -> dict[str, Attacks]:
    """Rows by model and attack, of images that every attack of the model was run on; the mixture
    among the first."""
    table: dict[str, Attacks] = defaultdict(lambda: defaultdict(dict))
    for row in run.rows:
        if (
            isinstance(row, AttackRow)
            and row.alpha is None
            and row.half is None
            and row.share_correct is None
        ):
            table[row.model][row.attack][row.index] = row
    listed = sorted(table, key=base_models_first)
    complete: dict[str, Attacks] = {}
    for model in listed:
        common = set.intersection(*map(set, table[model].values()))
        if CLEAN in table[model] and common:
            complete[model] = {
                attack: {i: rows[i] for i in sorted(common)}
                for attack, rows in table[model].items()
            }
    return complete


def _order(run: RunView, model: str, attacks: Attacks) -> list[str]:
    """The attacks of a model in the order in which they were run, which the identity of the run
    has."""
    described = run.identity.get("attacks")
    own = described.get(model) if isinstance(described, Mapping) else None
    listed = [name for name in own if name in attacks] if isinstance(own, Mapping) else []
    return [name for name in dict.fromkeys([*listed, *attacks]) if name != CLEAN]


def standing(attacks: Attacks, order: Sequence[str]) -> list[StandingCount]:
    """What stands without an attack, and after every stage of every attack in this order."""
    left = {i for i, row in attacks[CLEAN].items() if row.correct}
    n = len(attacks[CLEAN])
    steps = [StandingCount(CLEAN, "", len(left), n)]
    for attack in order:
        broken = {i: row for i, row in attacks[attack].items() if not row.correct}
        for stage in _stages(list(broken.values())):
            left -= {i for i, row in broken.items() if stage in ("", row.broken_by)}
            steps.append(StandingCount(attack, stage, len(left), n))
        left -= broken.keys()
        if steps[-1].attack != attack:
            steps.append(StandingCount(attack, "", len(left), n))
    return steps


def _stages(rows: Sequence[AttackRow]) -> list[str]:
    """Stages that broke an image, in the order in which they ran: those with fewer passes before
    them first.

    An image that a later stage broke has made all passes of the earlier ones. An audit comes last.
    """
    first: dict[str, float] = {}
    for row in rows:
        if row.broken_by and row.broken_by != CLEAN:
            passes = float("inf") if row.attack_passes is None else row.attack_passes
            first[row.broken_by] = min(first.get(row.broken_by, float("inf")), passes)
    unknown = [name for name, passes in first.items() if passes == float("inf")]
    if any(not name.startswith(AUDIT) for name in unknown):
        return []  # rows of an older version: the order is not known
    return sorted(first, key=lambda name: (name in unknown, first[name], name))


def _table(steps: Mapping[str, Sequence[StandingCount]]) -> Table:
    """A row for every stage that broke an image of any model; a model keeps its count where a stage
    broke none."""
    rows = _merged([[(step.attack, step.stage) for step in own] for own in steps.values()])
    lowered = {
        (step.attack, step.stage)
        for own in steps.values()
        for before, step in pairwise(own)
        if step.standing < before.standing
    }
    staged = {attack for attack, stage in rows if stage}
    rows = [
        (attack, stage)
        for attack, stage in rows
        if stage or attack not in staged or (attack, stage) in lowered
    ]
    counts = {
        model: {(step.attack, step.stage): step.standing for step in own}
        for model, own in steps.items()
    }
    attacks = {model: {step.attack for step in own} for model, own in steps.items()}
    left, body = {model: own[0].standing for model, own in steps.items()}, []
    for attack, stage in rows:
        row = [Cell("without an attack" if attack == CLEAN else attack, _stage_name(attack, stage))]
        for model, before in left.items():
            left[model] = counts[model].get((attack, stage), before)
            row.append(
                MISSING
                if attack not in attacks[model]
                else Cell(
                    str(left[model]),
                    ""
                    if attack == CLEAN
                    else (f"−{before - left[model]}" if left[model] < before else "±0"),
                )
            )
        body.append(row)
    short, n = format.short_names(steps), format.counts(own[0].n for own in steps.values())
    count = (
        " The number after @ is that of its steps or queries."
        if any("@" in row[0].note for row in body)
        else ""
    )
    return Table(
        f"Images that stand, of n = {n}, after each attack and stage that broke an image; below, how many it "
        f"took.{count}",
        ["after", *(short[model] for model in steps)],
        body,
    )


def _stage_name(attack: str, stage: str) -> str:
    """A stage without what the attack says already: "square@5" of square is its run of 5 queries or
    steps."""
    name, _, count = stage.partition("@")
    return "" if stage == attack or (name == attack and count) else stage


def _merged(lists: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """One order of all steps in which every list keeps its own as far as possible: the longest
    first."""
    merged: list[tuple[str, str]] = []
    for own in sorted(lists, key=len, reverse=True):
        place = 0
        for item in own:
            if item in merged:
                place = max(place, merged.index(item) + 1)
            else:
                merged.insert(place, item)
                place += 1
    return merged


def _passes_chart(run: RunView, tables: Mapping[str, Attacks]) -> Chart | None:
    """Share of images that stand under each attack alone against its passes, where rows have
    them."""
    panels, short, colors = [], format.short_names(tables), model_colors(tables)
    names = dict.fromkeys(
        attack for model, own in tables.items() for attack in _order(run, model, own)
    )
    for attack in list(names)[:MOST_ATTACKS]:
        lines = [
            line
            for model, own in tables.items()
            if attack in own
            and (line := _passes_line(list(own[attack].values()), colors[model], short[model]))
            is not None
        ]
        if lines:
            panels.append(
                Panel(
                    lines,
                    title=f"{attack}, up to {max(max(line.x) for line in lines):g} passes",
                    y_label=CORRECT,
                )
            )
    if not panels:
        return None
    falls = [
        line.x[-2]
        for panel in panels
        for line in panel.marks
        if isinstance(line, Line) and len(line.x) > 2
    ]
    longest = max(max(line.x) for panel in panels for line in panel.marks if isinstance(line, Line))
    shown = (
        0.0,
        min(longest, max(20.0, 1.15 * max(falls, default=0.0))) or 1.0,
    )  # then nothing falls any more
    panels = [replace(panel, x_range=shown) for panel in panels]
    return Chart(
        "attack-progress",
        f"Images that stand against passes of each attack, for {', '.join(short.values())}",
        panels,
        x_label="passes with a gradient, per image",
        height=0.5 + 2.3 * len(panels),
    )


def _passes_line(rows: Sequence[AttackRow], color: str, label: str) -> Line | None:
    """The curve of one model under one attack; survivors end it. What an audit broke stands
    here."""
    known = [row for row in rows if row.attack_passes is not None]
    if not known:
        return None
    wrong = sum(row.broken_by == CLEAN for row in rows)
    fell = sorted(
        row.attack_passes or 0 for row in known if not row.correct and row.broken_by != CLEAN
    )
    last = max(row.attack_passes or 0 for row in known)
    at = sorted({0, *fell, last})
    shares = [
        stats.clopper_pearson(len(rows) - wrong - sum(passes <= x for passes in fell), len(rows))
        for x in at
    ]
    return Line.of([float(x) for x in at], shares, color, label, marker="")
