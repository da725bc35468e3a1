"""How many images stand after each attack, stage and number of passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import synthetic_run

from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting.attack_progress import StandingCount, attack_progress, standing
from equipoise.reporting.charts import Chart
from equipoise.reporting.section import RunView

# Image: clean, then what suite and pgd do; 6 images, of which 5 are right without an attack.
SUITE = {
    0: ("clean", 0),
    1: ("early", 8),
    2: ("late", 30),
    3: (None, 40),
    4: (None, 40),
    5: ("early", 10),
}
PGD_BREAKS = {0, 1, 3}


def rows(model: str = "m", *, passes: bool = True) -> list[AttackRow]:
    def row(index: int, attack: str, correct: bool, **more: object) -> AttackRow:
        return AttackRow(
            index=index,
            model=model,
            attack=attack,
            label=0,
            predicted=int(not correct),
            correct=correct,
            **more,  # type: ignore[arg-type]
        )

    listed = [row(i, "clean", i != 0) for i in SUITE]
    listed += [
        row(i, "suite", stage is None, broken_by=stage, attack_passes=count if passes else None)
        for i, (stage, count) in SUITE.items()
    ]
    return listed + [row(i, "pgd", i not in PGD_BREAKS) for i in SUITE]


def view(
    listed: list[AttackRow],
    order: tuple[str, ...] = ("clean", "suite", "pgd"),
    command: str = "evaluate",
) -> RunView:
    return RunView(
        Path("run"),
        {"attacks": {"m": {name: {} for name in order}}},
        {},
        Summary(command=command, seconds=1.0),
        list(listed),
    )


def by_attack(listed: list[AttackRow]) -> dict[str, dict[int, AttackRow]]:
    return {
        attack: {row.index: row for row in listed if row.attack == attack}
        for attack in ("clean", "suite", "pgd")
    }


def test_images_stand_until_any_attack_or_stage_breaks_them() -> None:
    assert standing(by_attack(rows()), ["suite", "pgd"]) == [
        StandingCount("clean", "", 5, 6),
        StandingCount("suite", "early", 3, 6),
        StandingCount("suite", "late", 2, 6),
        StandingCount("pgd", "", 1, 6),
    ]
    assert standing(by_attack(rows()), ["pgd", "suite"]) == [
        StandingCount("clean", "", 5, 6),
        StandingCount("pgd", "", 3, 6),
        StandingCount("suite", "early", 2, 6),
        StandingCount("suite", "late", 1, 6),
    ]


def test_without_passes_the_order_of_stages_is_unknown() -> None:
    assert standing(by_attack(rows(passes=False)), ["suite", "pgd"]) == [
        StandingCount("clean", "", 5, 6),
        StandingCount("suite", "", 2, 6),
        StandingCount("pgd", "", 1, 6),
    ]


def test_what_only_an_audit_breaks_comes_last() -> None:
    audited = [
        replace(
            row,
            correct=False,
            predicted=1,
            broken_by="audit/early",
            attack_passes=None,
            audit_passes=9,
        )
        if (row.index, row.attack) == (4, "suite")
        else row
        for row in rows()
    ]
    assert standing(by_attack(audited), ["suite"])[-1] == StandingCount(
        "suite", "audit/early", 1, 6
    )


def test_the_table_follows_the_order_of_the_run() -> None:
    section = attack_progress(view(rows()))
    assert section is not None
    body = [[(cell.text, cell.note) for cell in row] for row in section.tables[0].body]
    assert body == [
        [("without an attack", ""), ("5", "")],
        [("suite", "early"), ("3", "−2")],
        [("suite", "late"), ("2", "−1")],
        [("pgd", ""), ("1", "−1")],
    ]
    other = attack_progress(view(rows(), ("clean", "pgd", "suite")))
    assert other is not None and [row[0].text for row in other.tables[0].body][1] == "pgd"


def test_the_curve_falls_after_the_passes_that_broke_an_image() -> None:
    section = attack_progress(view(rows()))
    assert section is not None and isinstance(section.pictures[0], Chart)
    (panel,) = section.pictures[0].panels  # pgd has no passes
    line = panel.marks[0]
    assert list(getattr(line, "x")) == [0, 8, 10, 30, 40]  # noqa: B009
    assert [round(6 * y / 100) for y in getattr(line, "y")] == [5, 4, 3, 2, 2]  # noqa: B009


def test_two_models_share_one_table() -> None:
    listed = [*rows(), *rows("other")]
    section = attack_progress(
        view([row for row in listed if (row.model, row.attack) != ("other", "pgd")])
    )
    assert section is not None
    assert [cell.text for cell in section.tables[0].body[-1]] == ["pgd", "1", "–"]


def test_a_model_keeps_its_count_in_stages_that_broke_only_others() -> None:
    def of(model: str, broken: set[int]) -> list[AttackRow]:
        return [
            AttackRow(
                index=i,
                model=model,
                attack=attack,
                label=0,
                correct=(right := attack == "clean" or (i not in broken)),
                predicted=int(not right),
                broken_by=None if right else "square@5",
                attack_passes=None if attack == "clean" else 2,
            )
            for attack in ("clean", "square", "pgd")
            for i in range(6)
        ]

    section = attack_progress(
        view([*of("m", set()), *of("other", {1, 2})], ("clean", "square", "pgd"))
    )
    assert section is not None and isinstance(section.pictures[0], Chart)
    body = [[(cell.text, cell.note) for cell in row] for row in section.tables[0].body]
    assert body[:2] == [
        [("without an attack", ""), ("6", ""), ("6", "")],
        [("square", ""), ("6", "±0"), ("4", "−2")],
    ]
    assert [row[0][0] for row in body] == ["without an attack", "square", "pgd"]
    assert {panel.x_range for panel in section.pictures[0].panels} == {
        (0.0, 2.0)
    }  # all of the passes, and no more


def test_runs_with_nothing_to_compare_have_no_section(tmp_path: Path) -> None:
    assert attack_progress(view(rows(), command="fit")) is None
    assert attack_progress(view([row for row in rows() if row.attack in ("clean", "pgd")])) is None
    assert (
        attack_progress(
            synthetic_run.write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))
        )
        is None
    )
