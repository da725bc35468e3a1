"""Sections of a fitted mixture, from synthetic arrays and a summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_run

from equipoise.core import arrays
from equipoise.core.arrays import FitArrays
from equipoise.core.promises import PromiseCheck, Target
from equipoise.core.results import Cost, FitSummary
from equipoise.core.threat import Threat
from equipoise.reporting import mixture_fit
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import RunView, Section, read_run

FIT = FitSummary(
    helped=True,
    promise="loses at most 2 points",
    clean=0.85,
    robust_clean=0.8,
    robust_attacked=0.5,
    q=0.3,
    alpha=0.77,
    rejected={"too near": 3},
    notes=("round 1",),
)
COSTS = (
    Cost(model="accurate", parameters=2_000_000, flops=1.5e9),
    Cost(model="mixed, gated", parameters=4_000_000, flops=1.75e9, accurate_share=0.22),
)


def fit_arrays() -> FitArrays:
    rng = np.random.default_rng(3)
    margins: dict[str, Any] = {
        f"{images}_{when}": rng.random(50)
        for images in ("clean", "attacked")
        for when in ("before", "after")
    }
    margins["clean_after"][:] = 0.25
    return FitArrays(
        q=0.3,
        **margins,
        clean_correct=rng.random(50) < 0.7,
        attacked_correct=rng.random(50) < 0.7,
        landscape=rng.random((6, 8, 7)),
        usable=rng.random((6, 8, 7)) < 0.9,
        axis_s=np.geomspace(0.05, 5, 7),
        axis_p=np.linspace(1, 4, 8),
        axis_c=np.linspace(-1.1, 0, 6),
        families=("normed", "one number"),
        family_scores=np.array([-np.inf, 0.875]),
        map_curve=np.array([[0.8, 0.5], [0.85, 0.48], [0.85, 0.47]]),
        plain_curve=np.array([[0.8, 0.5], [0.82, 0.48]]),
    )


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    folder = synthetic_run.make(
        tmp_path / "run", n=20, with_sweep=False, with_examples=False, fit=FIT, costs=COSTS
    )
    arrays.save(folder, fit_arrays())
    return read_run(folder)


def _shown(section: Section | None) -> Section:
    assert section is not None
    return section


def test_every_section_is_in_the_report(run: RunView) -> None:
    assert synthetic_run.section_titles(run) == [
        "Results",
        "Explore",
        "Attack progress",
        "Fitted mixture",
        "Trade-off compared with plain mixing",
        "Margins",
        "Margins before and after the logit map",
        "Search landscape",
        "Cost of a prediction",
        "Provenance",
    ]


def test_the_cost_of_a_cascade_names_its_views(run: RunView) -> None:
    costs = (*COSTS[:1], replace(COSTS[1], robust_passes=2.345))
    for own, views in (
        (COSTS, []),
        (costs, ["It runs 2.35 views of the robust model per clean image."]),
    ):
        section = _shown(mixture_fit.cost(replace(run, summary=replace(run.summary, costs=own))))
        assert [line for line in section.prose if "views" in line] == views


def test_the_fit_states_its_guarantee_and_rejected_candidates(run: RunView) -> None:
    section = _shown(mixture_fit.fitted(run))
    assert section.prose[0] == "The mixture loses at most 2 points."
    assert "85.0 % of the clean images" in section.prose[1]
    assert [[cell.text for row in table.body for cell in row] for table in section.tables] == [
        ["too near", "3"],
        ["round 1"],
    ]


@pytest.mark.parametrize(
    ("rule", "reused", "sentence"),
    [
        ("nuts", False, "50 fitting images, half of which selected the map."),
        ("paper", False, "50 fitting images, all of which selected the map."),
        ("nuts", True, "50 fitting images. "),
        ("paper", True, "50 fitting images. "),
    ],
)
def test_which_images_selected_the_map(
    tmp_path: Path, rule: str, reused: bool, sentence: str
) -> None:
    folder = synthetic_run.make(
        tmp_path / "run", n=20, with_sweep=False, with_examples=False, fit=replace(FIT, rule=rule)
    )
    one = np.ones(1)
    alone: dict[str, Any] = {
        "landscape": np.ones((1, 1, 1)),
        "usable": np.ones((1, 1, 1)) > 0,
        "axis_s": one,
        "axis_p": one,
        "axis_c": one,
    }
    arrays.save(folder, replace(fit_arrays(), **(alone if reused else {})))
    run = read_run(folder)
    assert sentence in _shown(mixture_fit.map_margins(run)).prose[1]
    assert (mixture_fit.landscape(run) is None) == reused


def test_mixednuts_says_that_it_promises_nothing(tmp_path: Path) -> None:
    fit = replace(
        FIT,
        helped=False,
        promise="promises nothing beyond its images",
        rule="paper",
        method="MixedNUTS",
        objective=0.5,
        recomputed_objective=0.667,
        notes=("the map changes a class",),
    )
    folder = synthetic_run.make(
        tmp_path / "run", n=20, with_sweep=False, with_examples=False, fit=fit
    )
    arrays.save(
        folder, replace(fit_arrays(), objective="conditional", landscape_family="MixedNUTS")
    )
    run = read_run(folder)
    section, text = _shown(mixture_fit.fitted(run)), " ".join(_shown(mixture_fit.fitted(run)).prose)
    assert section.title == "Fitted mixture: MixedNUTS"
    assert section.prose[0] == "The mixture promises nothing beyond its images."
    assert (
        "is 50.0 %, and 66.7 % if the mapped model is attacked again" in text
        and "calibration half" not in text
    )
    assert not section.tables[-1].collapsed, "where corrections would have mattered"
    landscape = " ".join(_shown(mixture_fit.landscape(run)).prose)
    assert (
        "of those that it corrects, for MixedNUTS" in landscape
        and "on all fitting images" in landscape
    )


def test_the_rule_is_named(tmp_path: Path) -> None:
    fit = replace(FIT, rule="switch", method="confidence switch")
    folder = synthetic_run.make(
        tmp_path / "run", n=20, with_sweep=False, with_examples=False, fit=fit
    )
    arrays.save(folder, fit_arrays())
    assert "Fitted mixture: confidence switch" in synthetic_run.section_titles(read_run(folder))
    assert (
        _shown(mixture_fit.trade_off(read_run(folder))).tables[0].body[0][0].text
        == "confidence switch"
    )


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (Target(0.02), "single fits exceed the target in about a third of the cases"),
        (Target(0.02, confidence=0.95), "at most 5 % exceed the target"),
    ],
)
def test_the_fit_says_what_its_promise_means(run: RunView, target: Target, sentence: str) -> None:
    promised = replace(run, summary=replace(run.summary, fit=replace(FIT, promised=target)))
    assert sentence in _shown(mixture_fit.fitted(promised)).prose[2]


def test_whether_the_promise_was_kept(run: RunView) -> None:
    assert mixture_fit.promise(run) is None
    check = PromiseCheck(
        value=0.031,
        low=0.021,
        high=0.041,
        n=1000,
        model="mixed",
        versus="robust",
        promised=Target(0.02),
        threat=Threat("linf", "8/255"),
    )
    section = _shown(
        mixture_fit.promise(replace(run, summary=replace(run.summary, promises=(check,))))
    )
    assert section.prose[0].startswith(
        "The mixture: the promise was exceeded by 1.1 points on these 1000 images"
    )
    assert [cell.text for cell in section.tables[0].body[0]] == [
        "mixed",
        "2 points of robust accuracy",
        "3.1",
        "1000",
        "exceeded",
    ]
    gained = replace(check, value=-0.0004, low=-0.012, high=0.011)
    section = _shown(
        mixture_fit.promise(replace(run, summary=replace(run.summary, promises=(gained,))))
    )
    measured = section.tables[0].body[0][2]
    assert (measured.text, measured.note) == ("0.0", "[−1.2, 1.1]")


def test_the_trade_off_says_that_thresholds_were_set_on_its_images(run: RunView) -> None:
    assert "not measurements" in _shown(mixture_fit.trade_off(run)).prose[1]


def test_the_cost_of_a_gated_prediction(run: RunView) -> None:
    section = _shown(mixture_fit.cost(run))
    assert [cell.text for cell in section.tables[0].body[1]] == ["mixed, gated", "4.00 M", "1.75 G"]
    assert "for 22.0 % of the clean images" in section.prose[1]


@pytest.mark.parametrize(
    ("objective", "score", "head"),
    [
        ("mixture", "Clean accuracy of the mixture", "clean accuracy"),
        (
            "surrogate",
            "Share of the robust model's clean errors on which the accurate model decides",
            "errors passed on",
        ),
    ],
)
def test_the_landscape_names_its_objective(
    run: RunView, objective: str, score: str, head: str
) -> None:
    arrays.save(run.folder, replace(fit_arrays(), objective=objective))
    section = _shown(mixture_fit.landscape(run))
    assert section.prose[0].startswith(score) and section.tables[0].head[1] == head


def test_the_landscape_draws_every_shift(run: RunView) -> None:
    with styled(LIGHT):
        panels = mixture_fit.draw_landscape(LIGHT, fit_arrays(), "score").axes
    for i, scores in enumerate(fit_arrays().landscape):
        np.testing.assert_allclose(np.asarray(panels[i].images[0].get_array()), 100 * scores)
    assert [panel.axison for panel in panels[:8]] == [True] * 6 + [False] * 2


def test_a_family_without_a_usable_candidate_has_no_score(run: RunView) -> None:
    table = _shown(mixture_fit.landscape(run)).tables[0]
    assert [[cell.text for cell in row] for row in table.body] == [
        ["normed", "–"],
        ["one number", "87.5 %"],
    ]


def test_medians_before_and_after_the_map(run: RunView) -> None:
    table = _shown(mixture_fit.map_margins(run)).tables[0]
    cells = {row[0].text: [cell.text for cell in row[1:]] for row in table.body}
    values = fit_arrays()
    assert cells["clean, correct"] == [
        f"{np.median(values.clean_before[values.clean_correct]):.3f}",
        "0.250",
    ]


def test_the_trade_off_leaves_out_points_that_gain_nothing(run: RunView) -> None:
    with styled(LIGHT):
        axes = _shown(mixture_fit.trade_off(run)).pictures[0].draw(LIGHT).axes[0]
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), [50, 48])


def test_a_fit_that_did_not_help_says_so(run: RunView) -> None:
    failed = replace(FIT, helped=False, promise="no mixture helps: too few images")
    section = _shown(mixture_fit.fitted(replace(run, summary=replace(run.summary, fit=failed))))
    assert section.prose == ["No mixture helps: too few images."]


def test_an_unknown_cost_is_a_dash(run: RunView) -> None:
    section = _shown(
        mixture_fit.cost(replace(run, summary=replace(run.summary, costs=(Cost(model="m"),))))
    )
    assert [cell.text for cell in section.tables[0].body[0]] == ["m", "–", "–"]
    assert "unknown" in section.prose[1]


def test_runs_without_a_fit_have_none_of_these_sections(tmp_path: Path) -> None:
    plain = read_run(synthetic_run.make(tmp_path / "run", n=20))
    for section in (
        mixture_fit.fitted,
        mixture_fit.map_margins,
        mixture_fit.landscape,
        mixture_fit.trade_off,
        mixture_fit.cost,
    ):
        assert section(plain) is None


def test_the_robust_model_alone_has_no_margins_after_a_map(
    run: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fit_arrays()
    alone = replace(own, clean_after=own.clean_before, attacked_after=own.attacked_before)
    monkeypatch.setattr(FitArrays, "load", lambda folder: alone)
    assert run.summary.fit is not None
    fit = replace(run.summary.fit, helped=False, method="robust model alone")
    assert mixture_fit.map_margins(replace(run, summary=replace(run.summary, fit=fit))) is None
