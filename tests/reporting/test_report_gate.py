"""Sections of the adaptive-smoothing study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import result, write_run

from equipoise.core.results import Difference, SelectionSummary, Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import gate
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import RunView, Section

IDENTITY = {"command": "reproduce", "study": "adaptive-smoothing"}


def _shown(section: Section | None) -> Section:
    assert section is not None
    return section


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    rows = [
        AttackRow(
            index=i,
            model="gate",
            attack=attack,
            label=0,
            correct=True,
            image_alpha=alpha + 0.01 * i,
        )
        for attack, alpha in (("clean", 0.2), ("B", 0.8), ("D", 0.5))
        for i in range(5)
    ]
    selection = SelectionSummary(
        clean=0.9,
        attacked=0.5,
        met=False,
        candidates_attacked=3,
        mixture="alpha=0.5",
        keep=0.95,
        target=0.52,
    )
    joint = [result("gate", "C and D", 0.55), result("plain", "C and D", 0.5)]
    clean = [result("gate", "clean", 0.93), result("plain", "clean", 0.9)]
    summary = Summary(
        command="reproduce",
        seconds=1.0,
        study="adaptive-smoothing",
        results=tuple(clean),
        oracle_gate=(result("gate", "clean", 0.99), result("gate", "C", 0.8)),
        joint=tuple(joint),
        selections={"gate": selection},
        leads=(Difference(model="gate", versus="plain", value=0.02, low=-0.01, high=0.04, n=50),),
    )
    view = write_run(tmp_path / "run", summary, rows, IDENTITY)
    others = (result("plain, 0.8", "clean", 0.95), result("plain, 0.8", "worst", 0.4))
    write_run(
        view.folder / "trade-off",
        Summary(
            command="evaluate",
            seconds=1.0,
            results=others,
            joint=(result("plain, 0.8", "C and D", 0.4),),
        ),
    )
    fixed = tuple(
        result(model, "worst", value, alpha=alpha)
        for model, alpha, value in (
            ("gate", 0.0, 0.7),
            ("gate", 0.5, 0.6),
            ("plain", 0.0, 0.5),
            ("plain", 0.5, 0.65),
        )
    )
    write_run(view.folder / "aimed", Summary(command="evaluate", seconds=1.0, results=fixed))
    settings = tuple(
        result("trained against A", metric, 0.5) for metric in ("clean", "A", "B", "C", "D")
    )
    write_run(view.folder / "settings", Summary(command="evaluate", seconds=1.0, results=settings))
    trained = tuple(
        result(model, metric, 0.5) for model in ("constant", "scale 2") for metric in ("clean", "B")
    )
    write_run(
        view.folder / "ablation",
        Summary(command="evaluate", seconds=1.0, results=trained, clean_target=0.91),
    )
    return view


def test_the_oracle_bound_is_beside_the_joint_results(run: RunView) -> None:
    section = _shown(gate.oracle_gate(run))
    bounds, joint, selections = section.tables
    assert [[cell.text for cell in row] for row in joint.body] == [
        ["gate", "93.0 %", "55.0 %"],
        ["plain", "90.0 %", "50.0 %"],
    ]
    assert list(bounds.head) == ["model", "clean", "C"] and bounds.body[0][2].text == "80.0 %"
    assert "95.0 %" in selections.caption and selections.body[0][3].note == "below the target"
    assert "C is an attack suite" in section.prose[1]


def test_alphas_are_counted_by_attack(run: RunView) -> None:
    section = _shown(gate.alphas(run))
    assert (
        section.prose[0]
        == "Median alpha of gate: 0.220 on clean images, 0.820 under B, 0.520 under D."
    )
    with styled(LIGHT):
        figure = section.pictures[0].draw(LIGHT)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["gate"]


def test_the_trade_off_joins_the_run_and_its_parts(run: RunView) -> None:
    section = _shown(gate.trade_off(run))
    assert [row[0].text for row in section.tables[0].body] == [
        "plain",
        "plain, keeps 0.8",
        "gate, keeps 0.95",
    ]
    assert "gate compared with plain +2.0 (−1.0 to +4.0)" in section.prose[1]
    with styled(LIGHT):
        axes = section.pictures[0].draw(LIGHT).axes[0]
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), [50.0, 40.0])


def test_attacks_that_ignore_the_gate(run: RunView) -> None:
    assert (
        "plain 50.0 % at alpha 0; gate 60.0 % at alpha 0.5"
        in _shown(gate.fixed_alphas(run)).prose[0]
    )


def test_settings_and_ablation(run: RunView) -> None:
    assert list(_shown(gate.settings(run)).tables[0].head) == ["gate", "clean", "A", "B", "C", "D"]
    section = _shown(gate.ablation(run))
    assert "91.0 %" in section.prose[0]
    assert [[row[0].text for row in table.body] for table in section.tables] == [
        ["constant"],
        ["scale 2"],
    ]


def test_other_runs_have_none_of_these_sections(run: RunView, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", Summary(command="evaluate", seconds=1.0), run.rows)
    for name in ("aimed", "settings", "ablation", "trade-off"):
        (run.folder / name).rename(other.folder / name)
    for section in (
        gate.oracle_gate,
        gate.alphas,
        gate.trade_off,
        gate.fixed_alphas,
        gate.settings,
        gate.ablation,
    ):
        assert section(other) is None
