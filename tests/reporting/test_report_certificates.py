"""Certified accuracy, mixtures of equal clean accuracy, estimated margins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import result, section_titles, write_run

from equipoise.certification.mixture import THEOREMS
from equipoise.core.results import (
    ExcludedModel,
    FrontierPoint,
    Result,
    SelectedAlpha,
    Summary,
    TheoremResult,
)
from equipoise.core.rows import CertificateRow, MixingRatioRow
from equipoise.reporting import accuracy, certificates
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import RunView, Section
from equipoise.reporting.title import title

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


def _shown(section: Section | None) -> Section:
    assert section is not None
    return section


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    ratios = [
        MixingRatioRow(
            index=i,
            model="base",
            attack="mixing-ratio",
            label=0,
            correct=True,
            ratio=None if i == 0 else i / 10,
        )
        for i in range(9)
    ]
    rows = [
        *certificate_rows("base"),
        *certificate_rows("better", 0.05),
        *certificate_rows("mixed", alpha=0.8),
        *ratios,
    ]
    results: list[Result] = []
    for model, alpha in (("base", None), ("better", None), ("mixed", 0.8)):
        results += [
            result(model, metric, 0.6, alpha=alpha, sigma=SIGMA)
            for metric in ("acr", "certified@0.00", "certified@0.25", "samples")
        ]
    results += [
        result("base", "broken-pgd", 0.0, n=30, allowed=1),
        result("base", "true@0.25", 0.6),
    ]
    return write_run(
        tmp_path / "run",
        Summary(command="certify", seconds=1.0, results=tuple(results)),
        rows,
        IDENTITY,
    )


def test_the_table_has_a_row_per_metric_and_a_column_per_model(run: RunView) -> None:
    first, votes = _shown(certificates.certified(run)).tables
    assert list(first.head) == ["metric", "base", "better", "mixed (alpha 0.8)"]
    assert [row[0].text for row in first.body] == [
        "average radius",
        "certified at radius 0.00",
        "certified at radius 0.25",
        "noisy samples",
    ]
    assert [row[1].text for row in first.body] == ["0.600", "60.0 %", "60.0 %", "1"]
    assert [row[0].text for row in votes.body] == ["votes of the true class at radius 0.25"]


def test_rows_are_in_order_of_the_radius(run: RunView) -> None:
    summary = replace(
        run.summary, results=(*run.summary.results, result("better", "certified@0.50", 0.4))
    )
    table = _shown(certificates.certified(replace(run, summary=summary))).tables[0]
    assert [row[0].text for row in table.body][-3:] == [
        "certified at radius 0.25",
        "certified at radius 0.50",
        "noisy samples",
    ]


def test_the_prose_states_failure_probability_and_attacks(run: RunView) -> None:
    text = " ".join(_shown(certificates.certified(run)).prose)
    assert "with probability 0.001" in text and "Theorem A.2" in text
    assert "broke 0 of 30 certificates; the failure probability allows 1." in text


def test_figures_draw_every_model_and_the_ratios(run: RunView) -> None:
    pictures = _shown(certificates.certified(run)).pictures
    with styled(LIGHT):
        curves, ratios = (picture.draw(LIGHT) for picture in pictures)
    assert len(curves.axes[0].get_lines()) == 4, (
        "three models, and the radii of Theorem A.2 of the mixture"
    )
    assert [text.get_text() for text in ratios.legends[0].get_texts()] == ["base (n = 8)"]


def test_radii_of_the_papers_theorem_are_smaller() -> None:
    rows = certificate_rows("mixed", alpha=0.8)
    ours, paper = (certificates.theorem_radii(rows, 0.8, theorem) for theorem in ("ours", "A.2"))
    assert (ours >= paper - 1e-6).all() and ours.sum() > paper.sum() > 0


def test_certified_accuracy_by_radius() -> None:
    estimates = certificates.certified_accuracy(
        np.array([0.0, 0.2, 0.5, 0.5]), np.array([0.0, 0.2, 0.5, 0.51])
    )
    assert [estimate.value for estimate in estimates] == [0.75, 0.75, 0.5, 0.0]


def test_a_decided_radius_has_no_curve(run: RunView) -> None:
    """Radii at which sampling stopped for another reason say nothing about certified accuracy."""
    results = (
        result("base", "certified@0.07", 0.5, sigma=SIGMA),
        result("base", "samples", 90, sigma=SIGMA),
    )
    decided = replace(
        run,
        identity={**IDENTITY, "plan": {**IDENTITY["plan"], "decide_radius": 0.07}},
        summary=replace(run.summary, results=results),
    )
    section = _shown(certificates.certified(decided))
    assert [picture.name for picture in section.pictures] == ["mixing-ratios"]
    assert "reaches 0.07" in section.prose[1] and "Average" not in section.tables[0].caption
    assert [row[0].text for row in section.tables[0].body] == [
        "certified at radius 0.07",
        "noisy samples",
    ]


def test_mixtures_by_alpha_and_theorem(tmp_path: Path) -> None:
    """A panel and a table per theorem; a line per alpha, none above that of our radius."""
    rows = [row for alpha in (0.6, 0.9) for row in certificate_rows("m", alpha=alpha)]
    theorems = tuple(
        TheoremResult(
            model="m",
            metric="acr",
            value=0.3,
            low=0.2,
            high=0.4,
            n=40,
            alpha=alpha,
            sigma=SIGMA,
            theorem=theorem,
        )
        for alpha in (0.6, 0.9)
        for theorem in THEOREMS
    )
    view = write_run(
        tmp_path / "run", Summary(command="certify", seconds=1.0, theorems=theorems), rows, IDENTITY
    )
    section = _shown(certificates.theorems(view))
    assert len(section.tables) == 4 and [row[0].text for row in section.tables[0].body] == [
        "m (alpha 0.6)",
        "m (alpha 0.9)",
    ]
    with styled(LIGHT):
        figure = section.pictures[0].draw(LIGHT)
    curves = [
        [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
        for axes in figure.axes
    ]
    assert len(curves) == 4 and all(len(lines) == 2 for lines in curves)
    for lines in curves[:-1]:
        assert all((ours >= line).all() for ours, line in zip(curves[-1], lines, strict=True))
    assert (
        certificates.theorems(replace(view, summary=replace(view.summary, theorems=theorems[:4])))
        is None
    )


def test_alphas_that_agree_to_four_digits_stay_apart(tmp_path: Path) -> None:
    """In curves and tables: each mixture with its own rows."""
    alphas = (0.81231, 0.81234)
    rows = [row for alpha in alphas for row in certificate_rows("m", alpha=alpha)]
    results = tuple(
        result("m", "acr", value, alpha=alpha, sigma=SIGMA)
        for alpha, value in zip(alphas, (0.3, 0.4), strict=True)
    )
    theorems = tuple(
        TheoremResult(
            model="m",
            metric="acr",
            value=0.3,
            low=0.2,
            high=0.4,
            n=40,
            alpha=alpha,
            sigma=SIGMA,
            theorem=theorem,
        )
        for alpha in alphas
        for theorem in THEOREMS
    )
    summary = Summary(command="certify", seconds=1.0, results=results, theorems=theorems)
    view = write_run(tmp_path / "run", summary, rows, IDENTITY)
    table = _shown(certificates.certified(view)).tables[0]
    assert list(table.head) == ["metric", "m (alpha 0.81231)", "m (alpha 0.81234)"]
    assert [cell.text for cell in table.body[0]] == ["average radius", "0.300", "0.400"]
    assert "n = 40 images" in _shown(certificates.certified(view)).prose[0]
    assert len(_shown(certificates.theorems(view)).tables[0].body) == 2


@pytest.fixture
def mixtures(tmp_path: Path) -> RunView:
    alphas = {0.25: 1.0, 0.5: 0.8}
    rows = [
        row
        for sigma, alpha in alphas.items()
        for row in certificate_rows(f"s{sigma}", alpha=alpha, sigma=sigma)
    ]
    summary = Summary(
        command="certify",
        seconds=1.0,
        selected_alphas=tuple(
            SelectedAlpha(
                model=f"s{sigma}",
                alpha=alpha,
                sigma=sigma,
                target=0.9,
                low=0.8,
                high=0.97,
                clean_estimate=0.92,
                n=50,
            )
            for sigma, alpha in alphas.items()
        ),
        frontier=(
            FrontierPoint(
                radius=0.25, value=0.6, low=0.5, high=0.7, n=30, model="s0.5", alpha=0.8, sigma=0.5
            ),
        ),
        excluded=(ExcludedModel(model="s1", target=0.9, most=0.8, n=50),),
    )
    return write_run(tmp_path / "run", summary, rows, IDENTITY)


def test_the_frontier_tables(mixtures: RunView) -> None:
    section = _shown(certificates.frontier(mixtures))
    assert (
        "90.0 %" in section.prose[0]
        and "Excluded: s1 is estimated to reach at most 80.0 %" in section.prose[2]
    )
    assert [cell.text for cell in section.tables[0].body[1]] == ["s0.5", "0.5", "0.8", "92.0 %"]
    assert [cell.text for cell in section.tables[1].body[0]] == ["0.25", "60.0 %", "0.5", "0.8"]


def test_the_frontier_is_the_best_mixture_in_every_panel(mixtures: RunView) -> None:
    with styled(LIGHT):
        figure = _shown(certificates.frontier(mixtures)).pictures[0].draw(LIGHT)
    assert len(figure.axes) == 3
    for axes in figure.axes:
        best, *lines = (np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines())
        assert len(lines) == 4, "two mixtures, each with its smoothed model alone"
        assert (best >= lines[0]).all() and (best >= lines[2]).all()
    areas = [
        float(np.asarray(axes.get_lines()[0].get_ydata(), dtype=float).sum())
        for axes in figure.axes
    ]
    assert areas[0] < areas[1] < areas[2], "Theorem 3.5, Theorem A.2, ours"


def test_the_frontier_is_in_the_report(mixtures: RunView) -> None:
    assert section_titles(mixtures) == [
        "Results",
        "Certified accuracy",
        "Alpha and sigma at equal clean accuracy",
        "Provenance",
    ]


def test_estimated_margins(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))
    values = (
        result("m", "lipschitz", 2.0),
        result("m", "margin", -0.2),
        result("m", "kept@0.5", 0.1),
        result("m", "kept@1", 0.6),
        result("m", "attacked-kept@0.5", 0.3),
    )
    write_run(
        tmp_path / "run" / "estimate", Summary(command="estimate", seconds=1.0, results=values)
    )
    section = _shown(certificates.estimates(run))
    assert "estimates, not certificates" in section.prose[0]
    assert [cell.text for cell in section.tables[0].body[0]] == ["m", "2.000", "−0.200"]
    lines = certificates.kept_lines(values)
    assert [(line.label, list(line.x)) for line in lines] == [
        ("m, by the Lipschitz estimate", [0.5, 1.0]),
        ("m, at attacked images", [0.5]),
    ]


def test_other_runs_have_none_of_these_sections(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))
    for section in (certificates.certified, certificates.frontier, certificates.estimates):
        assert section(run) is None


def test_the_headline_says_noise_radius_and_that_models_are_smoothed(run: RunView) -> None:
    section = accuracy.headline(run)
    assert section.prose[0].startswith(
        "Smoothed with Gaussian noise of σ = 0.5, predictions are correct and certified "
        "at ℓ2 radius 0.25 for n = 40 images as follows: base on 60.0 %; "
    )
    assert list(section.tables[0].head) == [
        "smoothed model",
        "average radius",
        "certified at 0",
        "certified at 0.25",
    ]
    assert [cell.text for cell in section.tables[0].body[2]] == [
        "mixed (alpha 0.8)",
        "0.600",
        "60.0 %",
        "60.0 %",
    ]
    assert title(run)[0] == "Certificates, smoothed with σ = 0.5"


def test_models_of_several_noises_name_their_own(run: RunView) -> None:
    noisier = certificate_rows("better", 0.05, sigma=1.0)
    rows = [*(row for row in run.rows if row.model != "better"), *noisier]
    section = accuracy.headline(replace(run, rows=rows))
    assert "base (σ = 0.5) on" in section.prose[0] and "better (σ = 1) on" in section.prose[0]
    assert [row[1].text for row in section.tables[0].body] == ["0.5", "0.5", "1"]
