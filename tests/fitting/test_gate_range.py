"""The range of a gate: candidates, their attack, and what the selection says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_selection import make_data, make_gated

from equipoise.attacks import Apgd, Attack, Clean, Suite, fast
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.evaluation.plan import EvaluationPlan
from equipoise.fitting.conformal import lose_at_most
from equipoise.fitting.gated import (
    RangeSelection,
    candidate_attack,
    full_attack,
    select_range,
    with_ranges,
)
from equipoise.fitting.selection import Selected
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier


def make_selection(met: bool, attack: str = "short") -> RangeSelection:
    model = MixedClassifier(torch.nn.Identity(), torch.nn.Identity(), 0.5)
    correct, number = torch.ones(60, dtype=torch.bool), torch.arange(60)
    return RangeSelection(
        Selected(model, correct, number < 24, met, 3),
        Selected(model, correct, number < 30, True, 1),
        lose_at_most(2.0),
        attack,
    )


@pytest.mark.parametrize("met", [True, False])
def test_promise_says_whether_the_target_was_met(met: bool) -> None:
    promise = make_selection(met).promise
    assert (
        promise.startswith("kept 40.0 % of the 60 images") and "the robust model 50.0 %" in promise
    )
    assert "promises nothing, neither in expectation nor with any confidence" in promise
    assert (
        "no range that was tried loses at most 2 points of robust accuracy" in promise
    ) is not met


def test_promise_names_the_attack() -> None:
    assert "under a short attack, the robust" in make_selection(True).promise
    assert "under the attacks of an evaluation, the robust" in make_selection(True, "full").promise
    assert {row.attack for row in make_selection(True, "full").rows(make_data())} == {
        "clean",
        "full",
    }


def test_rows_of_both_models() -> None:
    rows = make_selection(True).rows(make_data())
    assert len(rows) == 4 * 60
    assert {(row.model, row.attack) for row in rows} == {
        (model, attack) for model in ("robust", "mixed") for attack in ("clean", "short")
    }
    assert sum(row.correct for row in rows if (row.model, row.attack) == ("mixed", "short")) == 24


def test_ranges() -> None:
    gated = make_gated()
    wide = with_ranges(gated, (0.0, 0.5), (0.4,))
    assert len(wide) == 1 + 6 and wide[0].alpha == pytest.approx(1 / 1.5)
    mapped = gated.with_settings_of(
        MixedClassifier(
            gated.accurate, gated.robust, 0.8, hard=True, logit_map=LogitMap(1.0, 1.0, 0.0)
        )
    )
    assert len(with_ranges(mapped, (0.0, 0.5), (0.4,))) == 1, "with a map, g alone never decides"


def test_gate_is_attacked_with_and_without_alpha_penalty() -> None:
    gated = make_gated()
    attack = candidate_attack(gated)
    assert isinstance(attack, Suite) and [member.extra is None for member in attack.attacks] == [
        False,
        True,
    ]
    fixed = candidate_attack(MixedClassifier(gated.accurate, gated.robust, 0.5))
    assert isinstance(fixed, Suite) and all(member.extra is None for member in fixed.attacks)


def as_mapped(gated: GatedClassifier) -> GatedClassifier:
    return gated.with_settings_of(
        MixedClassifier(
            gated.accurate, gated.robust, 0.8, hard=True, logit_map=LogitMap(1.0, 1.0, 0.0)
        )
    )


@pytest.mark.parametrize(
    ("kind", "long_runs"), [("gate", True), ("mapped", True), ("plain", False)]
)
def test_full_attack_has_every_stage_of_an_evaluation(kind: str, long_runs: bool) -> None:
    gated: MixedClassifier = as_mapped(make_gated()) if kind == "mapped" else make_gated()
    if kind == "plain":
        gated = MixedClassifier(gated.accurate, gated.robust, 0.8)
    plan = EvaluationPlan(
        {"mixed": gated},
        make_data(),
        {"fast": fast()},
        norm="linf",
        audit=0,
        source="mix",
        adaptive=["surrogate"],
        stand_in=None,
        device=torch.device("cpu"),
    )
    evaluated = [
        stage.name
        for job in plan.jobs
        if job.name == "mixed" and job.attack_name != "clean"
        for stage in job.attack.stages()
    ]
    selecting = [stage.name.split("/", 1)[1] for stage in full_attack(gated).stages()]
    assert (
        sorted(selecting) == sorted(evaluated)
        and (sum("long/" in name for name in selecting) > 3) == long_runs
    )
    assert len({stage.name for stage in full_attack(gated).stages()}) == len(selecting)


def test_selected_range_keeps_the_target() -> None:
    conditions = Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, 60)
    selection = select_range(
        make_gated(), make_data(), lose_at_most(20.0), conditions, attack="short"
    )
    assert selection.selected.met and selection.selected.attacked >= selection.robust.attacked - 0.2
    assert selection.selected.clean >= selection.robust.clean
    assert selection.summary().robust_attacked == selection.robust.attacked


def test_full_selection_is_at_least_as_cautious(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It keeps what the short attack broke, attacks what it selects by the full one, and resumes
    from its folder."""
    attacked: list[MixedClassifier] = []

    def counted(model: MixedClassifier) -> Attack:
        attacked.append(model)
        return Apgd(loss="margin", steps=20)

    monkeypatch.setattr("equipoise.fitting.gated.candidate_attack", lambda model: Clean())
    monkeypatch.setattr("equipoise.fitting.gated.full_attack", counted)
    conditions = Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, 60)
    short, full = (
        select_range(
            make_gated(), make_data(), lose_at_most(5.0), conditions, tmp_path / "pool", attack
        )
        for attack in ("short", "full")
    )
    assert full.robust.attacked < short.robust.attacked, (
        "the long attack must be stronger for this test to say much"
    )
    assert (
        full.selected.attacked <= short.selected.attacked
        and full.selected.clean <= short.selected.clean
    )
    assert any(model is full.selected.model for model in attacked) and full.selected.met
    before = len(attacked)
    again = select_range(
        make_gated(), make_data(), lose_at_most(5.0), conditions, tmp_path / "pool", "full"
    )
    assert len(attacked) == before and torch.equal(again.selected.survived, full.selected.survived)
