"""Which images a mixture was fitted on, and the frontier of mixtures."""

from __future__ import annotations

import pytest

from equipoise import data
from equipoise.core.checks import InputError
from equipoise.mixing import FrontierMixture, Provenance
from equipoise.mixing.provenance import pareto_frontier

FRONTIER = (FrontierMixture(0.01, 0.85, 0.9, "relu", 1.0, 2.0, -0.5),
            FrontierMixture(0.03, 0.9, 0.8, "gelu", 2.0, 3.0, -1.0, 0.25, 1.5))


def test_a_frontier_holds_no_dominated_mixture() -> None:
    dominated = FrontierMixture(0.03, 0.84, 0.7, "relu", 1.0, 2.0, -0.5)
    assert pareto_frontier([FRONTIER[1], dominated, FRONTIER[0], FRONTIER[0]]) == FRONTIER


def test_overlap_with_the_fitting_images() -> None:
    provenance = Provenance("shapes", "test", ("3-5", "9"), "")
    images = data.load_data("shapes", split="test", count=12)
    assert provenance.overlap(images) == ("3-5", "9")
    assert provenance.overlap(images.slice(4, 3)) == ("4-5",)
    assert provenance.overlap(images.slice(6, 2)) == ()
    assert Provenance("digits", "test", ("3-5",), "").overlap(images) == ()
    assert Provenance.of(images.slice(2, 4), "p") == Provenance("shapes", "test", ("2-5",), "p")


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "5-3", "1-2-3", "9" * 30, "1.5", "٣"])
def test_ranges_are_positions(text: str) -> None:
    with pytest.raises(InputError, match="`images` must be ranges of positions"):
        Provenance("shapes", "test", (text,), "")


def test_a_huge_range_takes_no_memory() -> None:
    images = data.load_data("shapes", split="test", count=12)
    assert Provenance("shapes", "test", ("0-99999999999999999",), "").overlap(images) == ("0-11",)
