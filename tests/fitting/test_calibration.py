"""Calibration: thresholds and promises on the half that did not select the map."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from synthetic_logits import make_logits
from torch import Tensor

from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.fitting import FitSettings
from equipoise.fitting.conformal import Target, beta, lose_at_most
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.margin_grid import MapFamily
from equipoise.fitting.pipeline import CalibratedMixture, Calibration, calibrated_mixture
from equipoise.fitting.search import MapSearch, SearchSpace, families
from equipoise.mixing import LogitMap


def calibrate(
    target: Target,
    *,
    accuracy: float = 0.95,
    like: LogitMap | None = None,
    selecting: Tensor | None = None,
    space: SearchSpace | None = None,
) -> CalibratedMixture:
    logits = make_logits(accuracy=accuracy)
    half = logits.halves(0)[0]
    search = MapSearch(half, families("auto", half, "gelu-monotone"), space=space)
    search.run(target)
    data = Dataset(
        "random",
        "test",
        torch.zeros(300, 1, 2, 2, dtype=torch.uint8),
        logits.labels,
        logits.index,
        tuple("abcdef"),
    )
    attack = MarginAttack(
        torch.nn.Identity(),
        torch.nn.Identity(),
        data,
        Threat("linf", 0.1),
        torch.device("cpu"),
        FitSettings(),
    )
    return calibrated_mixture(
        Calibration(search, logits, target, like, selecting), attack, ["a note"]
    )


@pytest.fixture(scope="module")
def fitted() -> CalibratedMixture:
    return calibrate(lose_at_most(5.0))


def test_mixture_that_helps(fitted: CalibratedMixture) -> None:
    summary, mixture = fitted.summary, fitted.mixture
    assert summary.helped and summary.clean > summary.robust_clean and summary.notes == ("a note",)
    assert (
        mixture.hard
        and mixture.logit_map is not None
        and mixture.alpha == pytest.approx(1 / (1 + summary.q))
    )
    assert 0.5 <= mixture.surrogate_alpha <= 0.9
    assert mixture.provenance is not None and mixture.provenance.images == ("0-299",)


def test_promise_names_target_adversary_and_images(fitted: CalibratedMixture) -> None:
    assert fitted.summary.promise == (
        "loses at most 5 points of robust accuracy in expectation, whatever the accurate model predicts at the "
        "attacked points, by conformal risk control on 150 images that did not select the map"
    )


def test_threshold_loses_the_allowed_images(fitted: CalibratedMixture) -> None:
    logits, mixture = fitted.calibration.logits, fitted.mixture
    assert mixture.logit_map is not None
    p = torch.stack(
        [mixture.map_robust(points[logits.survived]).exp() for points in logits.attacked]
    )
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


def test_targets_of_one_share_are_calibrated_one_by_one(fitted: CalibratedMixture) -> None:
    """A share of the robust images allows fewer losses than the same share of all images."""
    calibration = fitted.calibration
    alphas = []
    for target in (Target(0.1), Target(0.1, of_robust=True), Target(0.1)):
        point = calibration.point(target)
        assert point is not None
        alphas.append(point[0].alpha)
    assert alphas[0] == alphas[2] < alphas[1]


def test_reused_map() -> None:
    like = LogitMap(2.0, 1.5, -0.3, rivals=0.5)
    mixture = calibrate(lose_at_most(5.0), like=like).mixture
    assert mixture.logit_map is not None and mixture.logit_map.settings == like.settings


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lose_at_most(0.5), "150 images are too few to promise 0.5 points"),
        (lose_at_most(0.0), "that nothing is lost cannot be promised"),
        (beta(0.0), "images that the robust model survives, which the accurate model alone does"),
    ],
)
def test_target_that_cannot_be_promised(target: Target, reason: str) -> None:
    fitted = calibrate(target)
    assert not fitted.summary.helped and fitted.mixture.alpha == 1.0
    assert (
        fitted.summary.promise.startswith("no mixture helps: ") and reason in fitted.summary.promise
    )


def test_accurate_model_that_does_not_help() -> None:
    fitted = calibrate(lose_at_most(5.0), accuracy=0.1)
    assert not fitted.summary.helped and not fitted.mixture.frontier
    assert fitted.summary.clean == fitted.summary.robust_clean
    assert "of the clean images that did not select it correctly" in fitted.summary.promise


def test_reused_map_whose_threshold_is_too_small() -> None:
    """Nothing was searched, so no candidate was rejected."""
    fitted = calibrate(lose_at_most(5.0), like=LogitMap(0.01, 1.0, 0.0, rivals=0.5))
    assert "the threshold of the reused map is q = 0.000" in fitted.summary.promise
    assert fitted.summary.promise.endswith("too near to 0; this is the robust model")
    assert not fitted.summary.rejected


def test_share_of_the_robust_images_is_promised_as_the_same_share_of_all() -> None:
    """The share of robust images among all is known for the calibration half only."""
    fitted = calibrate(beta(0.93))
    own = fitted.calibration.point(beta(0.93))
    assert own is not None and own[0].lose_at_most == pytest.approx(0.07)
    assert 0 < fitted.calibration.survived < fitted.calibration.count


def test_promise_with_confidence() -> None:
    """Of 150 images, 5 points allow losing 6 in expectation, and 2 with 95 % confidence."""
    expected, confident = calibrate(lose_at_most(5.0)), calibrate(lose_at_most(5.0, 0.95))
    assert lose_at_most(5.0).allowed(150, 0) == 6 and lose_at_most(5.0, 0.95).allowed(150, 0) == 2
    assert confident.summary.promise == (
        "loses at most 5 points of robust accuracy with 95 % confidence, whatever the accurate model predicts at the "
        "attacked points, by an exact binomial bound on 150 images that did not select the map"
    )
    assert confident.summary.promised == lose_at_most(
        5.0, 0.95
    ) and expected.summary.promised == lose_at_most(5.0)
    for fitted, losses in ((expected, 6), (confident, 2)):
        calibration, logit_map = fitted.calibration, fitted.mixture.logit_map
        assert logit_map is not None
        own = logit_map.settings
        family = MapFamily(own.clamp, own.rivals, own.unit or 0.0)
        margins = calibration.grid.one(
            family, torch.tensor([own.scale, own.power, own.shift])
        ).margins[0]
        assert int((margins <= fitted.mixture.q).sum()) == losses
    provenance = confident.mixture.with_target(
        100 * confident.mixture.frontier[0].lose_at_most
    ).provenance
    assert (
        provenance is not None
        and provenance.target is not None
        and provenance.target.confidence == 0.95
    )
    assert "with 95 % confidence, as one of several" in provenance.promise


def test_too_few_images_for_confidence() -> None:
    promise = calibrate(lose_at_most(1.0, 0.95)).summary.promise
    assert (
        "150 images are too few to promise 1 point of robust accuracy with 95 % confidence, which needs at least "
        "299"
    ) in promise


def test_images_that_selected_a_reused_map_are_left_out() -> None:
    like = LogitMap(2.0, 1.5, -0.3, rivals=0.5)
    half = make_logits().halves(0)[1].index
    fitted = calibrate(lose_at_most(5.0), like=like, selecting=half[:46])
    assert fitted.calibration.count == 104 and fitted.calibration.left_out == 46
    assert "on 104 images that did not select the map" in fitted.summary.promise
    nothing = calibrate(lose_at_most(5.0), like=like, selecting=half).summary
    assert (
        not nothing.helped
        and "0 images (150 others selected the map that is reused) are too few" in nothing.promise
    )


def test_accurate_model_that_is_worse_is_named() -> None:
    """Also where every candidate was rejected, which is then beside the point."""
    saturated = SearchSpace(s=(49.0, 50.0), p=(7.5, 8.0), c=(-0.2, 0.0), steps=2)
    for space in (None, saturated):
        promise = calibrate(lose_at_most(5.0), accuracy=0.1, space=space).summary.promise
        assert (
            "the accurate model classifies " in promise
            and "% of the clean images correctly, the robust" in promise
        )
        assert "every candidate was rejected" not in promise
