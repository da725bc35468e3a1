"""Sections of the local-smoothing study about the learned policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import result, write_run

from equipoise.core import arrays
from equipoise.core.arrays import GradientArrays
from equipoise.core.results import CrossingSummary, Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import local_policy
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import Section

IDENTITY = {"command": "reproduce", "study": "local-smoothing"}
ALPHAS = (0.0, 0.5, 0.9, 1.0)


def _shown(section: Section | None) -> Section:
    assert section is not None
    return section


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        (True, "cross at γ₀ = 3.2 (95 % of resampled image sets: 1.1 to 9)"),
        (False, "do not cross at these strengths"),
    ],
)
def test_the_crossing_has_an_interval_or_does_not_exist(
    tmp_path: Path, met: bool, expected: str
) -> None:
    crossing = CrossingSummary(gamma=3.2, low=1.1, high=9.0, met=met)
    run = write_run(
        tmp_path / "run",
        Summary(command="reproduce", seconds=1.0, crossing=crossing),
        identity=IDENTITY,
    )
    results = [
        result(model, "worst", value, alpha=alpha)
        for alpha in ALPHAS
        for model, value in (("accurate", alpha), ("robust", 0.6))
    ]
    write_run(
        run.folder / "crossing", Summary(command="evaluate", seconds=1.0, results=tuple(results))
    )
    section = _shown(local_policy.crossing(run))
    assert expected in section.prose[0]
    with styled(LIGHT):
        axes = section.pictures[0].draw(LIGHT).axes[0]
    assert "γ₀ = 3.2" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("through", "expected"),
    [
        (0.3, "Attacks through the policy are stronger (30.0 %)"),
        (0.4, "Attacks through the policy are equally strong"),
        (0.5, "This attack is stronger than every attack through the policy"),
    ],
)
def test_the_stronger_attack_on_the_policy_is_named(
    tmp_path: Path, through: float, expected: str
) -> None:
    row = AttackRow(index=0, model="adaptive", attack="pgd-20", label=0, correct=True)
    own = tuple(
        result("adaptive", metric, value)
        for metric, value in (("clean", 0.9), ("pgd-20", through), ("worst", through))
    )
    run = write_run(
        tmp_path / "run", Summary(command="reproduce", seconds=1.0, results=own), [row], IDENTITY
    )
    results = [
        result(model, "worst", 0.4 + 0.1 * alpha, alpha=alpha)
        for model in ("accurate", "robust", "adaptive")
        for alpha in ALPHAS
    ]
    write_run(
        run.folder / "targets", Summary(command="evaluate", seconds=1.0, results=tuple(results))
    )
    assert expected in _shown(local_policy.targets(run)).prose[0]


def test_radii_are_drawn_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="reproduce", seconds=1.0), identity=IDENTITY)
    results = tuple(
        result(model, f"eps {eps}", 0.5) for model in ("robust", "adaptive") for eps in (0.18, 0.06)
    )
    write_run(run.folder / "radii", Summary(command="evaluate", seconds=1.0, results=results))
    with styled(LIGHT):
        axes = _shown(local_policy.radii(run)).pictures[0].draw(LIGHT).axes[0]
    assert [list(np.asarray(line.get_xdata())) for line in axes.lines] == [[0.06, 0.18]] * 2


def test_autoattack_is_apart_from_the_attacks_of_the_headline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="reproduce", seconds=1.0), identity=IDENTITY)
    results = tuple(
        result(model, "auto", value)
        for model, value in (("accurate", 0.0), ("robust", 0.42), ("adaptive", 0.19))
    )
    write_run(run.folder / "auto", Summary(command="evaluate", seconds=1.0, results=results))
    section = _shown(local_policy.autoattack(run))
    assert section.prose[0].startswith("Under AutoAttack, the adaptive classifier reaches 19.0 %")
    assert "the robust model 42.0 %" in section.prose[0]
    assert [row[0].text for row in section.tables[0].body] == ["accurate", "robust", "adaptive"]


def test_gradient_norms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    norms = {
        f"{images}_of_{model}": rng.random((30, 4)) + (model == "accurate")
        for images in GradientArrays.INPUTS
        for model in GradientArrays.MODELS
    }
    run = write_run(tmp_path / "run", Summary(command="reproduce", seconds=1.0), identity=IDENTITY)
    arrays.save(run.folder, GradientArrays(**norms))
    section = _shown(local_policy.gradients(run))
    assert section.prose[0].startswith("The accurate model has the larger gradient for 100.0 %")
    with styled(LIGHT):
        densities, matrices = (picture.draw(LIGHT) for picture in section.pictures)
    assert [len(axes.lines) for axes in densities.axes] == [3, 3]
    assert [np.asarray(axes.images[0].get_array()).shape for axes in matrices.axes[:3]] == [
        (8, 8)
    ] * 3


def test_correlations_agree_with_numpy_and_constant_columns_have_none() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random((20, 2)), np.column_stack([rng.random(20), np.ones(20)])
    matrix = local_policy.correlations(a, b)
    np.testing.assert_allclose(
        matrix[:3, :3], np.corrcoef(np.column_stack([a, b[:, 0]]).T), atol=1e-12
    )
    assert (matrix[3] == 0).all()


def test_other_runs_have_none_of_these_sections(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))
    for name in ("crossing", "targets", "radii", "auto"):
        write_run(run.folder / name, Summary(command="evaluate", seconds=1.0))
    for section in (
        local_policy.crossing,
        local_policy.targets,
        local_policy.radii,
        local_policy.autoattack,
        local_policy.gradients,
    ):
        assert section(run) is None
