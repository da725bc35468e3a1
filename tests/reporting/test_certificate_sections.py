"""Certified accuracy, theorems, mixtures of equal clean accuracy, estimated margins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import figure, result, shown, texts, values, write_run

from equipoise.certification.mixture import THEOREM_NAMES, THEOREMS
from equipoise.core import stats
from equipoise.core.results import (
    ExcludedModel,
    FrontierPoint,
    Result,
    SelectedAlpha,
    Summary,
    TheoremResult,
)
from equipoise.core.rows import CertificateRow
from equipoise.reporting import certificates
from equipoise.reporting.run_view import RunView
from equipoise.reporting.verdict import alarms, verdict

SIGMA = 0.5
IDENTITY: dict[str, Any] = {"command": "certify", "plan": {"sigma": SIGMA, "failure": 0.001}}


def certificate_rows(
    model: str, shift: float = 0.0, *, alpha: float | None = None, sigma: float = SIGMA
) -> list[CertificateRow]:
    lower = np.clip(np.random.default_rng(3).uniform(0.4, 1.0, 40) + shift, 0, 0.999)
    radius = THEOREMS["ours"](lower, sigma, 1.0 if alpha is None else alpha)
    mixture: dict[str, Any] = {} if alpha is None else {"accurate": 0, "gap": 0.0, "alpha": alpha}
    return [
        CertificateRow(
            index=i,
            model=model,
            attack="certify",
            label=0,
            predicted=0 if radius[i] > 0 else -1,
            correct=bool(radius[i] > 0),
            radius=float(radius[i]),
            lower=float(lower[i]),
            samples=1100,
            top=0,
            answer=0,
            sigma=sigma,
            **mixture,
        )
        for i in range(40)
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    rows = [
        *certificate_rows("base"),
        *certificate_rows("better", 0.05),
        *certificate_rows("mixed", alpha=0.8),
    ]
    results: list[Result] = []
    for model, alpha in (("base", None), ("better", None), ("mixed", 0.8)):
        for metric in ("clean", "acr", "certified@0.00", "certified@0.25", "samples"):
            results.append(result(model, metric, 0.6, alpha=alpha, sigma=SIGMA))
    results.append(result("base", "broken-pgd", 0.0, n=30, allowed=1))
    summary = Summary(command="certify", seconds=1.0, results=tuple(results))
    return write_run(tmp_path / "run", summary, rows, IDENTITY)


def test_the_verdict_is_certified_accuracy_by_radius(run: RunView) -> None:
    section = verdict(run)
    assert "ℓ2 radius 0.25: base (σ = 0.5) for 60.0 % of n" in section.text[0]
    assert "with probability 0.001" in section.text[1]
    (table,) = section.tables
    assert len(table.head) <= 6 and texts(table)[0][1] == "60.0 % [58.0, 62.0]"
    radii = certificates.radii_of(certificate_rows("base"))
    for x, y, low in values(figure(section, "certified"), "base", "x", "y", "y_low"):
        exact = stats.clopper_pearson(int((radii >= max(x - 1e-5, 1e-9)).sum()), 40)
        assert (y, low) == pytest.approx((exact.value, exact.low), abs=0.03)
    assert len({record["model"] for record in section.figures[0].records}) == 3


def test_every_metric_is_in_a_table(run: RunView) -> None:
    section = shown(certificates.certified(run))
    rows = {row[0]: row[1:] for row in texts(section.tables[0])}
    assert rows["average radius"][0] == "0.600 [0.580, 0.620]"
    assert rows["certified accuracy at 0.25"][2] == "60.0 % [58.0, 62.0]"
    assert "broke 0 of 30 certificates; the failure probability allows 1" in section.text[0]


def test_too_many_broken_certificates_are_an_alarm(run: RunView) -> None:
    broken = result("base", "broken-pgd", 0.1, n=30, allowed=1)
    changed = replace(run, summary=replace(run.summary, results=(broken,)))
    assert "3 of 30 certificates" in shown(alarms(changed)).alarms[0][0]
    assert alarms(run) is None


def test_a_decided_radius_has_no_curve(run: RunView) -> None:
    """Radii at which sampling stopped for another reason say nothing about certified accuracy."""
    plan = {**IDENTITY["plan"], "decide_radius": 0.07}
    decided = replace(run, identity={**IDENTITY, "plan": plan})
    assert verdict(decided).figures == []
    assert "0.07" in " ".join(shown(certificates.certified(decided)).text)


def test_radii_of_the_papers_theorem_are_smaller() -> None:
    rows = certificate_rows("mixed", alpha=0.8)
    ours, paper = (certificates.theorem_radii(rows, 0.8, theorem) for theorem in ("ours", "A.2"))
    assert (ours >= paper - 1e-6).all() and ours.sum() > paper.sum() > 0


def theorem_result(alpha: float, theorem: str, model: str = "m") -> TheoremResult:
    own = result(model, "acr", 0.3, alpha=alpha, sigma=SIGMA)
    return TheoremResult(**vars(own), theorem=theorem)


def test_mixtures_by_alpha_and_theorem(tmp_path: Path) -> None:
    """A figure and a table for each theorem; alphas that agree to four digits stay apart."""
    alphas = (0.81231, 0.81234)
    rows = [row for alpha in alphas for row in certificate_rows("m", alpha=alpha)]
    theorems = tuple(theorem_result(alpha, theorem) for alpha in alphas for theorem in THEOREMS)
    summary = Summary(command="certify", seconds=1.0, theorems=theorems)
    run = write_run(tmp_path / "run", summary, rows, IDENTITY)
    section = shown(certificates.theorems(run))
    assert len(section.figures) == len(section.tables) == len(THEOREM_NAMES)
    names = {record["model"] for record in section.figures[0].records}
    assert names == {"m (alpha 0.81231)", "m (alpha 0.81234)"}
    ours = values(figure(section, "certified-ours"), "m (alpha 0.81231)", "y")
    assert ours[0] > ours[-1]
    only_one = replace(summary, theorems=theorems[:4])
    assert certificates.theorems(replace(run, summary=only_one)) is None


def test_results_without_rows_are_left_out(run: RunView) -> None:
    theorems = (theorem_result(0.5, "ours", "gone"), theorem_result(0.6, "ours", "gone"))
    assert (
        certificates.theorems(replace(run, summary=replace(run.summary, theorems=theorems))) is None
    )


def test_mixtures_of_equal_clean_accuracy(tmp_path: Path) -> None:
    rows = [*certificate_rows("a"), *certificate_rows("b", 0.05)]
    selected = tuple(
        SelectedAlpha(
            model=model,
            alpha=0.8,
            sigma=SIGMA,
            target=0.9,
            clean_estimate=0.91,
            low=0.88,
            high=0.94,
            n=100,
        )
        for model in ("a", "b")
    )
    best = FrontierPoint(
        radius=0.25, model="b", alpha=0.8, sigma=SIGMA, value=0.7, low=0.6, high=0.8, n=40
    )
    summary = Summary(
        command="certify",
        seconds=1.0,
        selected_alphas=selected,
        frontier=(best,),
        excluded=(ExcludedModel(model="c", target=0.9, most=0.8, n=100),),
    )
    run = write_run(tmp_path / "run", summary, rows, IDENTITY)
    section = shown(certificates.equal_accuracy(run))
    assert (
        "90.0 % of n = 100" in section.text[0]
        and "c is estimated to reach at most 80.0 %" in section.text[1]
    )
    assert texts(section.tables[1]) == [["0.25", "70.0 % [60.0, 80.0]", "0.5", "0.8"]]
    assert len({record["model"] for record in section.figures[0].records}) == 2
