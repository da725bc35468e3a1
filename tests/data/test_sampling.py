"""Which images of a split are taken, and the warning about other class shares than those of the
split."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from equipoise.core import stats
from equipoise.core.checks import EquipoiseWarning, InputError
from equipoise.data import Dataset, class_share_notes, load_data, warn_of_class_shares
from equipoise.data.dataset import whole_split
from equipoise.data.sampling import SAMPLES, Part, sample_order


def split_of(counts: list[int], name: str = "toy") -> Dataset:
    """A split that is sorted by class."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    images = torch.arange(len(labels) * 3).remainder(251).to(torch.uint8).reshape(-1, 1, 1, 3)
    return whole_split(
        name, "test", images, labels, tuple(f"class {k}" for k in range(len(counts)))
    )


def class_counts(data: Dataset) -> list[int]:
    return torch.bincount(data.labels, minlength=data.num_classes).tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.integers(0, 5))
def test_every_prefix_of_a_stratified_order_is_within_one_of_proportional(
    counts: list[int], seed: int
) -> None:
    data = split_of(counts)
    order = sample_order(data, "stratified", seed)
    assert sorted(order.tolist()) == list(range(len(data)))
    prefixes = torch.nn.functional.one_hot(data.labels[order], len(counts)).cumsum(0)
    # In whole numbers: |n_k − n N_k / N| < 1.
    difference = prefixes * len(data) - torch.arange(1, len(data) + 1).unsqueeze(1) * torch.tensor(
        counts
    )
    assert bool((difference.abs() < len(data)).all())


@pytest.mark.slow
def test_every_prefix_of_many_stratified_orders() -> None:
    generator, orders = np.random.default_rng(0), 0
    for _ in range(1000):
        counts = (
            (generator.pareto(1.0, generator.integers(1, 30)) * 10)
            .astype(int)
            .clip(0, 2000)
            .tolist()
        )
        if any(counts):
            test_every_prefix_of_a_stratified_order_is_within_one_of_proportional.hypothesis.inner_test(  # type: ignore[attr-defined]
                counts, orders
            )
            orders += 1
    print(f"{orders} stratified orders")


def test_a_sorted_split_gives_all_classes_in_proportion() -> None:
    part = Part(0, 100, sample="stratified").of(split_of([500] * 10))
    assert class_counts(part) == [10] * 10
    assert class_counts(part.slice(0, 20)) == [2] * 10  # a slice of a sample is a sample
    assert class_counts(Part(0, 100).of(split_of([500] * 10))) == [100, *[0] * 9]


@pytest.mark.parametrize("sample", SAMPLES)
def test_parts_of_one_order_are_disjoint_nested_and_keep_the_index(sample: str) -> None:
    data = split_of([30, 5, 50, 15])
    first, second, longer = (
        Part(start, count, sample=sample, seed=3).of(data)
        for start, count in ((0, 40), (40, 60), (0, 70))
    )
    assert len(first) == 40 and len(second) == 60
    assert sorted(first.index.tolist() + second.index.tolist()) == list(range(100))
    assert longer.index[:40].tolist() == first.index.tolist()
    assert torch.equal(first.images, data.images[first.index]) and torch.equal(
        first.labels, data.labels[first.index]
    )
    assert Part(40, None, sample=sample, seed=3).of(data).index.tolist() == second.index.tolist()


@pytest.mark.parametrize("sample", SAMPLES[1:])
def test_the_seed_decides(sample: str) -> None:
    data = split_of([30, 5, 50, 15])
    drawn = [Part(0, 50, sample=sample, seed=seed).of(data) for seed in (0, 0, 1)]
    assert drawn[0].digest() == drawn[1].digest() != drawn[2].digest()
    assert (
        drawn[0].describe()["sample"] == f"{sample}, seed 0"
        and drawn[2].sample == f"{sample}, seed 1"
    )
    assert "sample" not in Part(0, 50).of(data).describe()  # as runs of earlier versions have it


@pytest.mark.parametrize("sample", SAMPLES)
def test_all_images_are_the_split_itself(sample: str) -> None:
    data = split_of([3, 4])
    assert Part(sample=sample).of(data) is data and Part(0, 7, sample=sample).of(data) is data


def test_every_takes_spread_images_of_any_sample() -> None:
    data = split_of([200, 100])  # every third position of the stratified order has the first class
    assert class_counts(Part(0, 150, 3, sample="stratified").of(data)) == [34, 16]
    assert Part(3, 7, 2).of(data).index.tolist() == [3, 5, 7, 9]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            {"sample": "frist"},
            "`sample` must be one of first, random, stratified, got 'frist' .did you mean 'first'",
        ),
        ({"seed": -1}, "`sample_seed` must be a whole number of at least 0"),
        ({"start": 4, "count": 7, "sample": "random"}, "`count` must be at most 6 from `start` 4"),
    ],
)
def test_wrong_parts(part: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Part(**part).of(split_of([5, 5]))  # type: ignore[arg-type]


def test_own_images_are_stratified_and_named_data_sets_first(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "f" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((2, 2), 16 * number, np.uint8)).save(
                tmp_path / "f" / name / f"{number}.png"
            )
    np.savez(
        tmp_path / "a.npz", images=np.zeros((12, 1, 2, 2), np.uint8), labels=np.repeat([0, 1], 6)
    )
    for own in (f"folder:{tmp_path / 'f'}", f"npz:{tmp_path / 'a.npz'}"):
        assert class_counts(load_data(own, count=6)) == [3, 3]
        assert class_counts(load_data(own, count=6, sample="first")) == [6, 0]
        assert load_data(own, count=6, sample_seed=1).sample == "stratified, seed 1"
    assert load_data("shapes", count=6).index.tolist() == list(range(6))
    assert load_data("shapes", count=6, sample="random").index.tolist() != list(range(6))


def test_a_warning_where_class_shares_differ() -> None:
    data = split_of([500] * 10)
    with pytest.warns(
        EquipoiseWarning, match=r"class 0 50.0 % instead of 10.0 %.*8 of 10 classes are missing"
    ):
        warn_of_class_shares(data.slice(450, 100))
    assert class_share_notes(data.slice(450, 100))[0].startswith(
        "the class shares of these 100 images differ"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fair in (
            data,
            data.slice(0, 2),
            *(Part(0, 100, sample=sample).of(data) for sample in SAMPLES[1:]),
        ):
            warn_of_class_shares(fair)


def test_the_level_of_the_test_is_exact() -> None:
    """Of random samples, a share of the level is called another one, even where chi-square would
    not hold."""
    sizes, generator = [50, 30, 15, 4, 1], np.random.default_rng(1)
    drawn = generator.multivariate_hypergeometric(sizes, 12, size=2000)
    wrong = sum(
        not stats.is_random_sample(counts.tolist(), sizes, 0.05, seed)
        for seed, counts in enumerate(drawn)
    )
    # Ties of the statistic make the test conservative.
    assert wrong / 2000 >= 0.02 and stats.clopper_pearson(wrong, 2000, 0.999).low <= 0.05
    assert stats.is_random_sample(sizes, sizes, 0.05) and not stats.is_random_sample(
        [0, 0, 7, 4, 1], sizes, 0.05
    )
