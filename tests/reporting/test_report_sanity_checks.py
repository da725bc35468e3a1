"""Sanity checks."""

from __future__ import annotations

from pathlib import Path

from synthetic_run import write_run

from equipoise.core.results import SanityCheck, Summary
from equipoise.reporting.sanity_checks import sanity_checks
from equipoise.reporting.section import Section


def _check(name: str, *, alarm: bool, attack: str = "fast") -> SanityCheck:
    return SanityCheck(
        name=name, value=0.4, alarm=alarm, explanation="share of images", model="m", attack=attack
    )


def _section(folder: Path, *checks: SanityCheck) -> Section:
    section = sanity_checks(
        write_run(folder, Summary(command="evaluate", seconds=1.0, sanity_checks=checks))
    )
    assert section is not None
    return section


def test_alarms_come_first_and_the_others_are_collapsed(tmp_path: Path) -> None:
    section = _section(
        tmp_path / "run",
        _check("randomness", alarm=False),
        _check("vanishing gradients", alarm=True),
    )
    assert section.prose[0] == "Alarms: vanishing gradients (m, fast)." and len(section.prose) == 3
    assert "upper bound" in section.prose[2]
    assert [(row[0].text, table.collapsed) for table in section.tables for row in table.body] == [
        ("vanishing gradients", False),
        ("randomness", True),
    ]


def test_a_run_without_alarms_says_so(tmp_path: Path) -> None:
    assert (
        _section(tmp_path / "run", _check("randomness", alarm=False)).prose[0]
        == "No check raises an alarm."
    )


def test_alarms_are_explained_if_adaptive_attacks_raise_none(tmp_path: Path) -> None:
    checks = [
        _check("vanishing gradients", alarm=True),
        _check("vanishing gradients", alarm=False, attack="adaptive"),
    ]
    assert "Alarms for m are the reason" in _section(tmp_path / "run", *checks).prose[2]


def test_alarms_under_adaptive_attacks_are_not_explained_away(tmp_path: Path) -> None:
    checks = [
        _check("vanishing gradients", alarm=True, attack=attack) for attack in ("fast", "adaptive")
    ]
    section = _section(tmp_path / "run", *checks)
    assert len(section.prose) == 3 and "Until these alarms are explained" in section.prose[2]
    assert [[(cell.text, cell.note) for cell in row] for row in section.tables[0].body] == [
        [("vanishing gradients", ""), ("share of images.", ""), ("0.4", "m: adaptive, fast")]
    ]


def test_runs_without_checks_have_no_section(tmp_path: Path) -> None:
    assert (
        sanity_checks(write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))) is None
    )
