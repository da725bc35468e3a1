"""Calibration: thresholds and promises on the half that did not select the map."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from synthetic_logits import make_logits

from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.fitting import FitSettings
from equipoise.fitting.cached_logits import MarginAttack
from equipoise.fitting.conformal import Target, beta, lose_at_most
from equipoise.fitting.pipeline import CalibratedMixture, Calibration, calibrated_mixture
from equipoise.fitting.search import MapSearch, families
from equipoise.mixing import LogitMap


def calibrate(target: Target, *, accuracy: float = 0.95, like: LogitMap | None = None) -> CalibratedMixture:
    logits = make_logits(accuracy=accuracy)
    half = logits.halves(0)[0]
    search = MapSearch(half, families("auto", half, "gelu-monotone"))
    search.run(target)
    data = Dataset("random", "test", torch.zeros(300, 1, 2, 2, dtype=torch.uint8), logits.labels, logits.index,
                   tuple("abcdef"))
    attack = MarginAttack(torch.nn.Identity(), torch.nn.Identity(), data, Threat("linf", 0.1), torch.device("cpu"),
                          FitSettings())
    return calibrated_mixture(Calibration(search, logits, target, like), attack, ["a note"])


@pytest.fixture(scope="module")
def fitted() -> CalibratedMixture:
    return calibrate(lose_at_most(5.0))


def test_mixture_that_helps(fitted: CalibratedMixture) -> None:
    summary, mixture = fitted.summary, fitted.mixture
    assert summary.helped and summary.clean > summary.robust_clean and summary.notes == ("a note",)
    assert mixture.hard and mixture.logit_map is not None and mixture.alpha == pytest.approx(1 / (1 + summary.q))
    assert 0.5 <= mixture.surrogate_alpha <= 0.9
    assert mixture.provenance is not None and mixture.provenance.images == ("0-299",)


def test_promise_names_target_adversary_and_images(fitted: CalibratedMixture) -> None:
    assert fitted.summary.promise == (
        "loses at most 5 points of robust accuracy in expectation, whatever the accurate model predicts at the "
        "attacked points, by conformal risk control on 150 images that did not select the map")


def test_threshold_loses_the_allowed_images(fitted: CalibratedMixture) -> None:
    logits, mixture = fitted.calibration.logits, fitted.mixture
    assert mixture.logit_map is not None
    p = torch.stack([mixture.map_robust(points[logits.survived]).exp() for points in logits.attacked])
    y = logits.labels[logits.survived].expand(len(p), -1).unsqueeze(2)
    margins = (p.gather(2, y).squeeze(2) - p.scatter(2, y, -1).amax(2)).amin(0)
    assert int((margins <= mixture.q).sum()) == lose_at_most(5.0).allowed(150, len(margins))


def test_frontier_trades_robustness_for_accuracy(fitted: CalibratedMixture) -> None:
    points = fitted.mixture.frontier
    assert len(points) >= 2 and points[0].clean > fitted.summary.robust_clean
    assert all(a.lose_at_most < b.lose_at_most and a.clean < b.clean for a, b in pairwise(points))
    other = fitted.mixture.with_target(100 * points[0].lose_at_most)
    assert other.alpha == pytest.approx(points[0].alpha) and other.provenance is not None
    expected = f"loses at most {100 * points[0].lose_at_most:.3g} points of robust accuracy"
    assert other.provenance.promise.startswith(expected)


def test_reused_map() -> None:
    like = LogitMap(2.0, 1.5, -0.3, rivals=0.5)
    mixture = calibrate(lose_at_most(5.0), like=like).mixture
    assert mixture.logit_map is not None and mixture.logit_map.settings == like.settings


@pytest.mark.parametrize(("target", "reason"), [
    (lose_at_most(0.5), "150 images are too few to promise 0.5 points"),
    (lose_at_most(0.0), "that nothing is lost cannot be promised"),
    (beta(0.0), "images that the robust model survives, which the accurate model alone does"),
])
def test_target_that_cannot_be_promised(target: Target, reason: str) -> None:
    fitted = calibrate(target)
    assert not fitted.summary.helped and fitted.mixture.alpha == 1.0
    assert fitted.summary.promise.startswith("no mixture helps: ") and reason in fitted.summary.promise


def test_accurate_model_that_does_not_help() -> None:
    fitted = calibrate(lose_at_most(5.0), accuracy=0.1)
    assert not fitted.summary.helped and not fitted.mixture.frontier
    assert fitted.summary.clean == fitted.summary.robust_clean
    assert "of the clean images that did not select it correctly" in fitted.summary.promise
