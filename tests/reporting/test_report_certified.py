from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.certification import SmoothingPlan, radii
from equipoise.core.records import Row, Run
from equipoise.evaluation.certified_summary import results_of
from equipoise.reporting import certified as room
from equipoise.reporting.style import LIGHT, styled
from equipoise.reporting.view import view

PLAN = SmoothingPlan(0.5, samples=1000, alpha=0.8)


def rows(model: str, shift: float, **more: Any) -> list[Row]:
    chance = np.random.default_rng(3)
    lower = np.clip(chance.uniform(0.4, 1.0, 40) + shift, 0, 0.999)
    radius = radii.one_sided(lower, 0.5, more.get("alpha", 1.0))
    return [{"index": i, "model": model, "attack": "certify", "label": 0, "predicted": 0 if radius[i] > 0 else -1,
             "correct": bool(radius[i] > 0), "radius": float(radius[i]), "lower": float(lower[i]), "samples": 1100,
             "top": 0, "answer": 0, **more} for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run", {"verb": "certify", "plan": PLAN.facts(), "data": {"name": "made"}}, {"device": "cpu"})
    run.append(rows("base", 0.0) + rows("better", 0.05) + rows("mixed", 0.0, alpha=0.8, accurate=0, gap=0.0))
    run.append([{"index": i, "model": "base", "attack": "mixing-ratio", "label": 0, "correct": True,
                 "ratio": None if i == 0 else i / 10} for i in range(9)])
    everything = run.finish()
    more: list[Row] = [
        {"model": "base", "metric": "broken-pgd", "value": 0.0, "low": 0.0, "high": 0.1, "n": 30, "broken": 0,
         "allowed": 1, "sound": True},
        {"model": "base", "metric": "true@0.25", "value": 0.6, "low": 0.5, "high": 0.7, "n": 40}]
    run.summarise("certify", 1.0, results_of(everything, PLAN) + more)
    return tmp_path / "run"


def test_the_section(folder: Path) -> None:
    section = room.certified(view(folder))
    assert section is not None and len(section.tables) == 2
    table = section.tables[0]
    assert list(table.head) == ["metric", "base", "better", "mixed (alpha 0.8)"]
    assert [row[0].text for row in table.body][:3] == ["acr", "certified@0.00", "certified@0.25"]
    text = " ".join(section.prose)
    assert "broke 0 of 30" in text and "Theorem A.2" in text
    with styled(LIGHT):
        figure = section.pictures[0].draw(LIGHT)
        ratios = section.pictures[1].draw(LIGHT)
    assert len(figure.axes[0].get_lines()) == 4, "three models, and the paper's radii of the mixture"
    assert ratios.axes[0].get_legend_handles_labels()[1] == ["base (n = 8)"]


def test_the_papers_curve_lies_below() -> None:
    own = rows("mixed", 0.0, alpha=0.8, accurate=0, gap=0.0)
    ours, theirs = room.found(own)["mixed (alpha 0.8)"], room.paper(own, "mixed (alpha 0.8)", 0.5)
    assert (ours >= theirs - 1e-6).all() and ours.sum() > theirs.sum() > 0
    assert len(room.paper(rows("base", 0.0), "base", 0.5)) == 0


def test_shares() -> None:
    found = room.share_at(np.array([0.0, 0.2, 0.5, 0.5]), np.array([0.0, 0.2, 0.5, 0.51]))
    assert [e.value for e in found] == [0.75, 0.75, 0.5, 0.0]


def test_nothing_to_show(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"verb": "evaluate"}, {})
    run.append([{"index": 0, "model": "m", "attack": "clean", "label": 0, "predicted": 0, "correct": True}])
    run.finish()
    run.summarise("evaluate", 1.0, [])
    assert room.certified(view(tmp_path / "run")) is None
