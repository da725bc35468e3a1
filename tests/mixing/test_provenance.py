"""Which images a mixture was fitted on, and the frontier of mixtures."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import data
from equipoise.core.checks import InputError
from equipoise.core.serialize import from_plain, to_plain
from equipoise.mixing import FrontierMixture, LogitMap, MixedClassifier, Provenance
from equipoise.mixing.provenance import RULES, halves, pareto_frontier, rule_of

FRONTIER = (
    FrontierMixture(0.01, 0.85, 0.9, "relu", 1.0, 2.0, -0.5),
    FrontierMixture(0.03, 0.9, 0.8, "gelu", 2.0, 3.0, -1.0, 0.0, 1.5),
)


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
    assert Provenance.of(images.slice(2, 4), "p") == Provenance(
        "shapes",
        "test",
        ("2-5",),
        "p",
        digests=b64encode(images.image_digests()[2:6].byteswap().tobytes()).decode(),
    )


def test_images_are_recognized_by_their_pixels() -> None:
    images = data.load_data("shapes", split="test", count=12)
    provenance = Provenance.of(images.slice(3, 4), "")
    renamed = replace(images, name="npz:/abs/a.npz", split="train", index=images.index + 100)
    assert provenance.overlap(renamed) == ("103-106",)
    assert provenance.overlap(images.take(torch.tensor([11, 4, 4]))) == ("4", "4")
    changed = images.images.clone()
    changed[4, 0, 0, 0] ^= 1
    assert provenance.overlap(replace(images, images=changed)) == ("3", "5-6")
    floats = data.as_dataset(
        (data.pixels(images.images), images.labels)
    )  # exact multiples of 1/255 are bytes again
    assert provenance.overlap(floats) == ("3-6",)


def test_digests_depend_on_shape_and_type_and_not_on_memory_layout() -> None:
    images = data.load_data("shapes", split="test", count=3)
    digests = images.image_digests()
    last = images.images.contiguous(memory_format=torch.channels_last)
    assert (
        replace(images, images=last).image_digests() == digests
    ).all() and digests.dtype == np.uint64
    other = replace(images, images=images.images.flatten(2).unsqueeze(3))
    assert not np.isin(other.image_digests(), digests).any() and len(set(digests.tolist())) == 3


@pytest.mark.parametrize(
    "digests", ["x", "AAAA", "AAAAAAAAAAA", "AAAAAAAAAAA= ", "é", "AAAAAAAAAAA=" * 2]
)
def test_digests_are_one_per_image(digests: str) -> None:
    with pytest.raises(InputError, match="`digests` must be"):
        Provenance("shapes", "test", ("3",), digests=digests)
    assert Provenance("shapes", "test", ("3",), digests="AAAAAAAAAAA=").images == ("3",)


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "5-3", "1-2-3", "9" * 30, "1.5", "٣"])
def test_ranges_are_positions(text: str) -> None:
    with pytest.raises(InputError, match="`images` must be ranges of positions"):
        Provenance("shapes", "test", (text,), "")


def test_a_huge_range_takes_no_memory() -> None:
    images = data.load_data("shapes", split="test", count=12)
    assert Provenance("shapes", "test", ("0-99999999999999999",), "").overlap(images) == ("0-11",)


def test_only_a_record_makes_a_map_mixednuts() -> None:
    nuts, switch = (
        LogitMap(1.0, 2.0, -0.5, "gelu"),
        LogitMap(1.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0),
    )
    assert rule_of(LogitMap(1.0, 1.0, 0.0, rivals=0.25), 0.9) == "nuts", (
        "only equal rivals make a switch"
    )
    assert [rule_of(logit_map, 0.9) for logit_map in (None, nuts, switch)] == [
        "plain",
        "nuts",
        "switch",
    ]
    assert rule_of(None, 1.0) == "robust"
    assert [name for name in RULES if RULES[name] == "MixedNUTS"] == ["paper"]
    recorded = Provenance("shapes", "test", ("3-5",), "", "paper")
    bases = nn.Identity(), nn.Flatten()
    assert MixedClassifier(*bases, 0.9, logit_map=nuts).method == "NUTS map (ours)"
    assert MixedClassifier(*bases, 0.9, logit_map=nuts, provenance=recorded).method == "MixedNUTS"


def test_the_rule_of_another_mixture_of_the_frontier() -> None:
    recorded = Provenance("shapes", "test", ("3-5",), "", "nuts")
    assert [recorded.with_target(mixture).rule for mixture in FRONTIER] == ["nuts", "switch"]


def test_an_unknown_rule() -> None:
    with pytest.raises(InputError, match="did you mean 'switch'"):
        Provenance("shapes", "test", ("3-5",), "", "swich")


def test_images_that_selected_the_map() -> None:
    """One half of the fitting images, by the seed; all of them where it is unknown, or a range is
    too long."""
    images = data.load_data("shapes", count=12)
    fitted = Provenance("shapes", "test", ("2-9",), "", seed=3)
    index = torch.arange(2, 10)
    assert torch.equal(fitted.selecting(images), index[halves(index, 3)[0]])
    assert fitted.selecting(images.slice(10, 2)).tolist() == []
    assert Provenance("shapes", "test", ("2-9",), "").selecting(images).tolist() == list(
        range(2, 10)
    )
    assert (
        len(Provenance("shapes", "test", ("0-99999999999999999",), "", seed=3).selecting(images))
        == 12
    )
    reused = fitted.with_images_of(Provenance("shapes", "test", ("0-3",), ""))
    assert reused.images == ("2-9",) and reused.seed is None and reused.overlap(images) == ("0-9",)
    assert reused.selecting(images).tolist() == [0, 1, 2, 3], (
        "the images of the threshold did not select the map"
    )
    again = Provenance("shapes", "test", ("10-11",), "").with_images_of(reused)
    assert again.selecting(images).tolist() == [0, 1, 2, 3] and again.overlap(images) == (
        "0-3",
        "10-11",
    )


@pytest.mark.parametrize("pixels", [False, True])
def test_images_of_a_reused_map_are_kept_under_any_name(pixels: bool) -> None:
    """The map was selected on a file given by one path, the threshold set on the same file given by
    another."""
    images = data.load_data("shapes", split="test", count=12)
    first, second = (
        replace(images, name=name) for name in ("npz:images.npz", "npz:/abs/images.npz")
    )
    map_of = (
        Provenance.of(first.slice(0, 4), "")
        if pixels
        else Provenance("npz:images.npz", "test", ("0-3",))
    )
    both = Provenance.of(second.slice(6, 2), "", like=map_of)
    assert both.overlap(first) == ("0-3", "6-7")
    assert both.overlap(second) == (("0-3", "6-7") if pixels else ("6-7",)), (
        "without digests, by name"
    )
    assert from_plain(Provenance, to_plain(both), "a file") == both
