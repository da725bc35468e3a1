"""Cached logits: halves, further points, checks, and the file in a run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from synthetic_logits import make_logits

from equipoise.core.checks import InputError
from equipoise.data import Dataset
from equipoise.fitting.cached_logits import CachedLogits, load_logits, save_logits


def images_of(logits: CachedLogits) -> Dataset:
    """A data set with the labels and positions of these logits."""
    return Dataset(
        "synthetic",
        "test",
        torch.zeros(len(logits), 1, 2, 2, dtype=torch.uint8),
        logits.labels,
        logits.index,
        tuple("abcdef"),
    )


def test_halves_partition_the_images() -> None:
    first, second = make_logits(101).halves(3)
    assert (len(first), len(second)) == (50, 51)
    assert sorted([*first.index.tolist(), *second.index.tolist()]) == list(range(101))


def test_halves_depend_on_image_and_seed_only() -> None:
    logits = make_logits(101)
    first = set(logits.halves(3)[0].index.tolist())
    shuffled = logits.take(torch.randperm(101, generator=torch.Generator().manual_seed(0)))
    assert set(shuffled.halves(3)[0].index.tolist()) == first
    assert set(logits.halves(4)[0].index.tolist()) != first


def test_points_with_and_without_classes() -> None:
    logits = make_logits(60)
    more = logits.with_points(logits.attacked[:1], torch.zeros(1, 60, dtype=torch.int64))
    assert more.accurate_attacked.tolist() == [[-1] * 60, [-1] * 60, [0] * 60]
    assert more.with_points(logits.attacked[:1]).accurate_attacked[-1].tolist() == [-1] * 60


def test_no_robust_image() -> None:
    logits = make_logits()
    wrong = -10 * torch.nn.functional.one_hot(logits.labels, 6).float().unsqueeze(0).expand(
        2, -1, -1
    )
    with pytest.raises(
        InputError, match="classify at least one attacked image correctly, got none of 300"
    ):
        dataclasses.replace(logits, attacked=wrong).checked()


def test_equal_predictions() -> None:
    logits = make_logits()
    with pytest.raises(InputError, match="must differ, got the same predictions on all 300 images"):
        dataclasses.replace(logits, accurate=logits.clean.argmax(1)).checked()


@pytest.mark.parametrize("with_logits", [True, False])
def test_cache_keeps_all_fields(tmp_path: Path, with_logits: bool) -> None:
    logits = (
        make_logits() if with_logits else dataclasses.replace(make_logits(), accurate_logits=None)
    )
    assert load_logits(tmp_path, images_of(make_logits())) is None
    save_logits(tmp_path, logits)
    loaded = load_logits(tmp_path, images_of(make_logits()))
    assert loaded is not None and (loaded.accurate_logits is not None) == with_logits
    assert torch.equal(loaded.attacked, logits.attacked) and torch.equal(
        loaded.accurate, logits.accurate
    )


def test_damaged_cache(tmp_path: Path) -> None:
    (tmp_path / "logits.npz").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"must hold the logits of this fit .*; remove it"):
        load_logits(tmp_path, images_of(make_logits()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clean", torch.zeros(300, 5)),
        ("clean", torch.zeros(300, 6, dtype=torch.int64)),
        ("clean", torch.full((300, 6), float("nan"))),
        ("labels", torch.zeros(300, dtype=torch.int64)),
        ("index", torch.arange(1, 301)),
        ("accurate", torch.full((300,), 6)),
        ("accurate", torch.zeros(300)),
        ("attacked", torch.zeros(3, 300, 6)),
        ("accurate_attacked", torch.full((2, 300), -2)),
    ],
)
def test_cache_of_other_images_or_types(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    save_logits(tmp_path, dataclasses.replace(make_logits(), **{name: value}))
    with pytest.raises(InputError, match=f"must hold the logits of this fit .*{name}"):
        load_logits(tmp_path, images_of(make_logits()))
