"""Mixtures that are selected to be equally robust."""

from __future__ import annotations

import pytest
from small_pair import untrained_pair

from equipoise.core.checks import InputError
from equipoise.mixing import FrontierMixture, LogitMap, MixedClassifier
from equipoise.studies.adaptive_mixtures import nearest_map

POINTS = tuple(
    FrontierMixture(lose, 0.9, 0.8, "linear", scale, 1.0, 0.0)
    for lose, scale in ((0.5, 3.0), (0.05, 7.0))
)


def mixture(logit_map: LogitMap | None, frontier: tuple[FrontierMixture, ...]) -> MixedClassifier:
    pair = untrained_pair()
    return MixedClassifier(
        pair.accurate, pair.robust, 1.0, hard=True, logit_map=logit_map, frontier=frontier
    )


def test_a_fit_that_does_not_help_gives_the_map_of_the_nearest_loss() -> None:
    """Such a fit is the robust model alone; without a map plain mixing would be compared under its
    name."""
    for points, nearest in ((1.0, POINTS[1]), (80.0, POINTS[0])):
        found = nearest_map(mixture(None, POINTS), points)
        assert found.describe() == nearest.logit_map().describe()


def test_a_fit_that_helps_keeps_its_map() -> None:
    own = POINTS[0].logit_map()
    assert nearest_map(mixture(own, POINTS), 5.0) is own


def test_without_any_map_there_is_no_switch_to_compare() -> None:
    with pytest.raises(
        InputError, match="a confidence switch on the held-out images, for any loss, got 'no map'"
    ):
        nearest_map(mixture(None, ()), 5.0)
