"""Rows and arrays of a fit."""

from __future__ import annotations

import pytest
import torch
from linear_pair import make_attack, make_data, make_pair

from equipoise.fitting import artifacts
from equipoise.fitting.conformal import lose_at_most
from equipoise.fitting.pipeline import CalibratedMixture, fit_mixture
from equipoise.mixing import HardLabels


@pytest.fixture(scope="module")
def fitted() -> CalibratedMixture:
    return fit_mixture(make_attack(*make_pair()), lose_at_most(10.0))


def test_rows_of_both_models_clean_and_attacked(fitted: CalibratedMixture) -> None:
    rows = artifacts.rows(fitted)
    assert len(rows) == 5 * 200 and {row.half for row in rows} == {"search", "calibration"}
    correct = {
        (model, attack): sum(
            row.correct for row in rows if (row.model, row.attack) == (model, attack)
        )
        for model in ("robust", "mixed")
        for attack in ("clean", "minimum-margin")
    }
    assert correct["mixed", "clean"] > correct["robust", "clean"]
    logits, halves = (
        fitted.calibration.all_logits,
        {row.index: row.correct for row in rows if row.model == "accurate"},
    )
    assert halves == dict(
        zip(logits.index.tolist(), (logits.accurate == logits.labels).tolist(), strict=True)
    )
    assert -20 <= correct["mixed", "minimum-margin"] - correct["robust", "minimum-margin"] <= 0


def test_clean_rows_are_predictions_of_the_mixture(fitted: CalibratedMixture) -> None:
    data = make_data()
    with torch.no_grad():
        correct = fitted.mixture.predict(data.images.float() / 255) == data.labels
    rows = [row for row in artifacts.rows(fitted) if (row.model, row.attack) == ("mixed", "clean")]
    assert [row.correct for row in rows] == correct.tolist()
    half = [row.correct for row in rows if row.half == "calibration"]
    assert sum(half) / len(half) == pytest.approx(fitted.summary.clean)


def test_arrays(fitted: CalibratedMixture) -> None:
    arrays = artifacts.arrays(fitted)
    assert arrays.landscape.shape == arrays.usable.shape == (8, 8, 8)
    assert arrays.landscape_family in arrays.families and len(arrays.families) == 3
    assert arrays.family_scores is not None and len(arrays.family_scores) == 3
    assert arrays.selected is not None and arrays.selected.shape == (5,)
    assert arrays.clean_before.shape == arrays.clean_after.shape == (200,)
    assert arrays.map_curve is not None and arrays.plain_curve is not None
    assert arrays.map_curve.shape[1] == arrays.plain_curve.shape[1] == 2


def test_no_curve_of_plain_mixing_without_logits_of_the_accurate_model() -> None:
    accurate, robust = make_pair()
    fitted = fit_mixture(
        make_attack(HardLabels(lambda x: accurate(x).argmax(1)), robust), lose_at_most(10.0)
    )
    assert artifacts.arrays(fitted).plain_curve is None


def test_attacked_margins_are_the_first_minus_the_second_probability(
    fitted: CalibratedMixture,
) -> None:
    """Also of misclassified points, whose true class is often not second."""
    logits, arrays = fitted.calibration.all_logits, artifacts.arrays(fitted)
    p = logits.attacked.softmax(dim=2)
    own = p.gather(2, logits.labels.expand(len(p), -1).unsqueeze(2)).squeeze(2)
    others = p.scatter(2, logits.labels.expand(len(p), -1).unsqueeze(2), -1).amax(dim=2)
    worst = (own - others).argmin(dim=0)
    top = p[worst, torch.arange(len(logits))].topk(2, dim=1).values
    torch.testing.assert_close(torch.from_numpy(arrays.attacked_before), top[:, 0] - top[:, 1])
    assert not torch.allclose(top[:, 0] - top[:, 1], (own - others).amin(dim=0).abs()), (
        "the pair has such points"
    )
