from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from equipoise.certification import SmoothingPlan, radii
from equipoise.core.records import Row, Run
from equipoise.reporting import frontier as room
from equipoise.reporting import render
from equipoise.reporting.style import LIGHT, styled
from equipoise.reporting.view import view

PLAN = SmoothingPlan(0.25, samples=1000)
ALPHAS = {0.25: 1.0, 0.5: 0.8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run", {"verb": "certify", "plan": PLAN.facts(), "data": {"name": "made"}}, {"device": "cpu"})
    chance = np.random.default_rng(5)
    chosen: list[Row] = []
    for sigma, alpha in ALPHAS.items():
        lower = chance.uniform(0.5, 0.99, 30)
        reach = radii.one_sided(lower, sigma, alpha)
        run.append([{"index": i, "model": f"s{sigma}", "attack": "certify", "label": 0, "top": 0, "accurate": 0,
                     "gap": 0.0, "predicted": 0, "correct": bool(reach[i] > 0), "radius": float(reach[i]),
                     "lower": float(lower[i]), "samples": 1100, "answer": 0, "alpha": alpha, "sigma": sigma}
                    for i in range(30)])
        chosen.append({"model": f"s{sigma}", "alpha": alpha, "sigma": sigma, "wanted": 0.9, "clean-estimate": 0.92,
                       "low": 0.8, "high": 0.97, "n": 50})
    run.finish()
    points = [{"radius": 0.25, "value": 0.6, "low": 0.5, "high": 0.7, "n": 30, "model": "s0.5", "alpha": 0.8,
               "sigma": 0.5}]
    run.summarise("certify", 1.0, [], chosen=chosen, frontier=points)
    return tmp_path / "run"


def test_the_section(folder: Path) -> None:
    section = room.frontier(view(folder))
    assert section is not None and len(section.tables) == 2 and "90.0 %" in section.prose[0]
    assert [cell.text for cell in section.tables[0].body[1]] == ["s0.5", "0.5", "0.8", "92.0 %"]
    with styled(LIGHT):
        figure = section.pictures[0].draw(LIGHT)
    assert len(figure.axes) == 3
    for axes in figure.axes:
        lines = axes.get_lines()
        assert len(lines) == 5, "the best, and two mixtures beside their models alone"
        best = np.asarray(lines[0].get_ydata())
        assert all((best >= np.asarray(line.get_ydata())).all() for line in (lines[1], lines[3]))
    areas = [float(np.asarray(axes.get_lines()[0].get_ydata()).sum()) for axes in figure.axes]
    assert areas[0] < areas[1] < areas[2], "Theorem 3.5, Theorem A.2, ours"


def test_on_the_page(folder: Path) -> None:
    assert "Alpha and sigma at one clean accuracy" in render.write(folder).read_text(encoding="utf-8")
    assert (folder / "figures" / "frontier.svg").exists()


def test_nothing_was_chosen(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"verb": "certify"}, {})
    run.finish()
    run.summarise("certify", 1.0, [])
    assert room.frontier(view(tmp_path / "run")) is None
