"""Folders that the last version of schema 1 wrote have the same sections, under today's titles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import section_titles

from equipoise.reporting.section import read_run

FIXTURES = Path(__file__).parents[1] / "fixtures"
TITLES = {
    "What was found": "Results",
    "Symptoms": "Sanity checks",
    "Alpha and sigma at one clean accuracy": "Alpha and sigma at equal clean accuracy",
    "What was fitted": "Fitted mixture",
    "Trade-off against plain mixing": "Trade-off compared with plain mixing",
    "A fixed strength under three attacks": "Fixed strength under three attacks",
    "Neighbours as the oracle": "Nearest neighbours as the oracle",
    "Where the bases change places": "Crossing of the base models",
    "The policy under aimed attacks": "The policy under attacks of fixed strength",
    "Other radii": "Attacks of other radii",
    "Gradients of both sides": "Gradient norms of both models",
    "What a perfect gate could do": "Upper bound by an oracle gate",
    "What the gate says": "Alpha assigned by the gate",
    "The trade-off under C and D": "Trade-off under adversaries C and D",
    "Which attacks to train against": "Gates by training attack",
    "Margins before and after the map": "Margins before and after the logit map",
    "Landscape": "Search landscape",
    "How this was made": "Provenance",
}


def _expected() -> dict[str, list[str]]:
    """Section titles by finished folder."""
    finished = json.loads((FIXTURES / "schema1-expected.json").read_text(encoding="utf-8"))[
        "finished"
    ]
    return {name: item["sections"] for name, item in finished.items()}


@pytest.mark.parametrize("name", _expected())
def test_sections_of_a_schema_1_folder(name: str) -> None:
    run = read_run(FIXTURES / "schema1" / name)
    titles = section_titles(run)
    expected = [TITLES.get(title, title) for title in _expected()[name]]
    if name == "demo/sweep":  # a sweep is now drawn in its own report, too
        expected.insert(1, "Accuracy against alpha")
    if "Margins" in expected and run.summary.command in (
        "evaluate",
        "demo",
    ):  # images clean and under attacks
        expected.insert(1, "Explore")
        own = [row for row in run.rows if row.alpha is None]
        if any(
            len({row.attack for row in own if row.model == model}) > 2
            for model in {row.model for row in own}
        ):
            place = expected.index("Sanity checks") if "Sanity checks" in expected else 1
            expected.insert(place + 1, "Attack progress")
    if run.summary.command == "fit":  # whose figures are of its fitting images
        expected[0] = "Accuracy on the fitting images"
    assert titles == expected
