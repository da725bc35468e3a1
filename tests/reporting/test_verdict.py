"""The first screen: the numbers of the verdict are those of the rows, and what speaks against them is
said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_run
from several_runs import FIRST, evaluation
from several_runs import training as trained
from synthetic_run import ACCURACIES, THREAT, shown, texts, values

from equipoise.core import format
from equipoise.core.audits import Audit
from equipoise.core.promises import PromiseCheck, Target
from equipoise.core.results import FitSummary, SanityCheck, SelectionSummary
from equipoise.core.rows import AttackRow
from equipoise.reporting.run_view import RunView, read_run
from equipoise.reporting.section import Section
from equipoise.reporting.verdict import alarms, verdict

FIT = FitSummary(
    helped=True,
    promise="loses at most 2 points",
    clean=0.85,
    robust_clean=0.8,
    robust_attacked=0.5,
    q=0.3,
    alpha=0.77,
    promised=Target(0.02),
)
ALARM = SanityCheck(
    name="vanishing gradients",
    value=0.4,
    alarm=True,
    explanation="share of images",
    model="m",
    attack="fast",
    advice="Run Square.",
)


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    return read_run(synthetic_run.make(tmp_path / "run", n=40, with_sweep=False))


def changed(run: RunView, **more: Any) -> RunView:
    return replace(run, summary=replace(run.summary, **more))


def promise(kept: bool) -> PromiseCheck:
    value = 0.01 if kept else 0.09
    return PromiseCheck(
        value=value,
        low=value - 0.005,
        high=value + 0.005,
        n=40,
        model="mixed",
        versus="robust",
        promised=Target(0.02),
        threat=THREAT,
    )


def share_of(run: RunView, model: str, attacks: tuple[str, ...]) -> float:
    """Counted from the rows: correct under all of these attacks."""
    right: dict[int, bool] = {}
    for row in run.rows:
        if isinstance(row, AttackRow) and row.model == model and row.attack in attacks:
            right[row.index] = right.get(row.index, True) and row.correct
    return float(np.mean(list(right.values())))


def test_sentence_table_and_figure_have_the_numbers_of_the_rows(run: RunView) -> None:
    section = verdict(run)
    (figure,), (table,) = section.figures, section.tables
    assert len(table.head) <= 6
    for model, row in zip(ACCURACIES, texts(table), strict=True):
        name = run.name(model)
        clean = share_of(run, model, ("clean",))
        robust = share_of(run, model, ("clean", "pgd", "apgd"))
        assert row[0] == name and row[3] == "40"
        assert row[1].startswith(format.percent(clean)) and row[2].startswith(
            format.percent(robust)
        )
        assert values(figure, name, "clean", "robust") == [pytest.approx((clean, robust))]
        if model == "mixed":
            assert format.percent(clean) in section.text[0]
            assert format.percent(robust) in section.text[0]
    difference = next(
        item
        for item in run.summary.differences
        if (item.versus, item.metric) == ("robust", "worst")
    )
    assert format.points(difference.value) in section.text[0]
    assert "under every attack of the run (apgd, pgd) within ℓ∞ ≤ 8/255" in section.text[1]


def test_intervals_are_not_clipped(run: RunView) -> None:
    (figure,) = verdict(run).figures
    layers = figure.specification["layer"]
    scales = [
        layer["encoding"]["x"]["scale"]["domain"] for layer in layers if "x2" in layer["encoding"]
    ]
    for low, high in scales:
        for record in figure.records:
            assert low <= record["clean_low"] and record["clean_high"] <= high


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_promised_is_in_sentence_and_figure(run: RunView, kept: bool) -> None:
    promised = changed(run, promises=(promise(kept),), fit=FIT)
    section = verdict(promised)
    assert ("was kept" in section.text[0]) is kept and (
        "was exceeded" in section.text[0]
    ) is not kept
    robust = run.find("robust", "worst")
    assert robust is not None
    assert str(round(robust.value - 0.02, 5)) in str(section.figures[0].specification)
    assert (alarms(promised) is None) is kept


def test_of_several_models_the_most_robust_is_named(tmp_path: Path) -> None:
    correct = {"weak": FIRST["mixed"], "strong": {"clean": [True] * 8, "pgd": [True] * 8}}
    run = read_run(evaluation(tmp_path / "run", correct))
    assert "strong classifies 100.0 %" in verdict(run).text[0]


def test_only_a_fit_that_helped_is_a_mixture(run: RunView) -> None:
    fitted = changed(run, fit=FIT, command="fit")
    assert verdict(fitted).text[0] == "The mixture loses at most 2 points."
    alone = replace(FIT, helped=False, promise="no map helps")
    assert verdict(changed(run, fit=alone, command="fit")).text[0] == "No map helps."


def test_accuracies_on_fitting_images_are_called_optimistic(run: RunView) -> None:
    assert "optimistic" in " ".join(verdict(changed(run, fit=FIT, command="fit")).text)
    gate = SelectionSummary(
        clean=0.9, attacked=0.4, met=True, candidates_attacked=3, mixture="x", promise="keeps 93 %"
    )
    section = verdict(changed(run, gate=gate, command="fit"))
    assert section.text[0] == "The mixture keeps 93 %."
    assert "selected the range of the gate" in " ".join(section.text)


def alarm_texts(run: RunView) -> list[str]:
    return [f"{found} {meaning}" for found, meaning in shown(alarms(run)).alarms]


def test_a_failed_check_says_what_it_means_and_what_to_do(run: RunView) -> None:
    (text,) = alarm_texts(
        changed(run, sanity_checks=(ALARM, replace(ALARM, alarm=False, attack="x")))
    )
    assert "vanishing gradients" in text and "m, fast: 0.4" in text
    assert "upper bound" in text and "Run Square." in text


def test_alarms_answered_by_adaptive_attacks_are_none(run: RunView) -> None:
    adaptive = replace(ALARM, alarm=False, attack="adaptive")
    assert alarms(changed(run, sanity_checks=(ALARM, adaptive))) is None
    alarmed = replace(adaptive, alarm=True)
    assert alarms(changed(run, sanity_checks=(ALARM, alarmed))) is not None


def test_poor_audits_overlap_and_notes_are_said(run: RunView) -> None:
    audit = Audit(
        model="mixed",
        attack="fast",
        stronger="standard",
        n=40,
        survivors=20,
        audited=10,
        broken=2,
        excess=0.2,
        passes=9,
    )
    found = alarm_texts(
        changed(run, audits=(audit,), overlap={"mixed": ("0-3",)}, notes=("class shares differ",))
    )
    assert "25.0 points too high" in found[0]
    assert "fitted on images 0-3" in found[1] and "class shares differ" in found[2]


@pytest.mark.parametrize("kind", ["evaluate", "train"])
def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    make = (
        evaluation
        if kind == "evaluate"
        else lambda folder, finished: trained(folder, [1.0], finished=finished)
    )
    run = read_run(make(folder, finished=False))
    (text,) = alarm_texts(run)
    assert ("8 of 16 rows" if kind == "evaluate" else "1 of 3 epochs") in text
    assert "Repeat the command" in text
    assert isinstance(verdict(run), Section)


def test_a_finished_run_without_a_problem_has_no_alarm(run: RunView) -> None:
    assert alarms(run) is None
