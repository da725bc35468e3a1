from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from equipoise.core.checks import InputError
from equipoise.data.conversion import as_dataset
from equipoise.data.dataset import Dataset, whole_split

CLASSES = tuple("abcdef")


def make_dataset(count: int = 11, name: str = "toy") -> Dataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 5, 7), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 6, (count,), generator=generator)
    return whole_split(name, "test", images, labels, CLASSES)


def test_size_shape_and_classes() -> None:
    data = make_dataset()
    assert (len(data), data.image_shape, data.num_classes) == (11, (3, 5, 7), 6)
    assert data.index.tolist() == list(range(11))


def test_slice_is_exact_and_keeps_positions() -> None:
    data = make_dataset()
    part = data.slice(4, 3)
    assert part.index.tolist() == [4, 5, 6]
    assert torch.equal(part.images, data.images[4:7])
    assert torch.equal(part.labels, data.labels[4:7])
    assert part.slice(1, 2).index.tolist() == [5, 6]


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_partition_covers_every_index_once(count: int, data: st.DataObject) -> None:
    whole = make_dataset(count)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    edges = [0, *cuts, count]
    parts = [whole.slice(start, stop - start) for start, stop in pairwise(edges)]
    assert torch.cat([part.index for part in parts]).tolist() == list(range(count))
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)


@pytest.mark.parametrize(
    ("start", "count", "message"),
    [
        (8, 4, r"`count` must be at most 3 from `start` 8 in toy test \(11 images\), got 4"),
        (0, 12, r"`count` must be at most 11 from `start` 0 in toy test \(11 images\), got 12"),
        (11, 1, r"`start` must be at most 10 in toy test \(11 images\), got 11"),
        (-1, 1, r"`start` must be a whole number of at least 0, got -1"),
        (0, 0, r"`count` must be a whole number of at least 1, got 0"),
    ],
)
def test_a_slice_that_does_not_fit_is_an_error(start: int, count: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        make_dataset().slice(start, count)


def test_take_by_position_and_by_mask() -> None:
    data = make_dataset()
    assert data.take(torch.tensor([9, 2])).index.tolist() == [9, 2]
    kept = data.take(data.labels == data.labels[0])
    assert kept.index.tolist() == [
        row for row, label in enumerate(data.labels.tolist()) if label == data.labels[0]
    ]
    assert len(data.take(torch.zeros(11, dtype=torch.bool))) == 0


def test_digest_covers_every_part() -> None:
    data = make_dataset()
    other_pixel, other_label = data.images.clone(), data.labels.clone()
    other_pixel[10, 2, 4, 6] ^= 1
    other_label[10] = (other_label[10] + 1) % 6
    changed = [
        dataclasses.replace(data, images=other_pixel),
        dataclasses.replace(data, labels=other_label),
        dataclasses.replace(data, index=data.index + 1),
        dataclasses.replace(data, images=data.images.reshape(11, 3, 7, 5)),
    ]
    assert len({data.digest(), *(other.digest() for other in changed)}) == 5
    assert dataclasses.replace(data, name="elsewhere").digest() == data.digest()


def test_digest_does_not_depend_on_memory_layout() -> None:
    data = make_dataset()
    last = data.images.contiguous(memory_format=torch.channels_last)
    assert dataclasses.replace(data, images=last).digest() == data.digest()


def test_digest_is_stable() -> None:
    images = torch.arange(12, dtype=torch.uint8).reshape(2, 1, 2, 3)
    data = whole_split("toy", "train", images, torch.tensor([1, 0]), ("a", "b"))
    assert data.digest() == "0bd07039b9cf4db35d238da4ae3c2cfcd2a45405da91d6fbeb267717407a30f8"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "images",
            torch.zeros(11, 3, 5, 7, dtype=torch.float64),
            "`images` must be uint8 or float32",
        ),
        ("images", torch.full((11, 3, 5, 7), 1.5), r"`images` must lie in \[0, 1\]"),
        (
            "images",
            torch.zeros(11, 3, 5, dtype=torch.uint8),
            r"`images` must have shape \(N, C, H, W\)",
        ),
        (
            "images",
            torch.zeros(10, 3, 5, 7, dtype=torch.uint8),
            "`labels` must be as many as the images",
        ),
        ("labels", torch.full((11,), 6), r"`labels` must lie in 0..5"),
        ("labels", torch.zeros(11, dtype=torch.int32), "`labels` must be int64"),
        ("index", torch.zeros(10, dtype=torch.int64), r"`index` must be int64 of shape \(11,\)"),
        ("index", torch.arange(-1, 10), "`index` must not be negative"),
    ],
)
def test_invalid_fields_are_an_error(field: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(make_dataset(), **{field: value})  # type: ignore[arg-type]


def test_a_split_without_images_is_an_error() -> None:
    with pytest.raises(InputError, match="`toy test` must hold at least one image"):
        make_dataset(0)


def make_floats(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 4, 4, generator=generator), torch.arange(count) % 3


def test_digest_of_floats_differs_from_that_of_bytes() -> None:
    data = make_dataset()
    floats = dataclasses.replace(data, images=data.images.float() / 255)
    assert floats.digest() == dataclasses.replace(floats).digest() != data.digest()


def test_a_dataset_is_returned_unchanged() -> None:
    data = make_dataset()
    assert as_dataset(data) is data


def test_tensors_become_a_dataset() -> None:
    images, labels = make_floats()
    data = as_dataset((images, labels))
    assert torch.equal(data.images, images) and torch.equal(data.labels, labels)
    assert (data.name, data.split, data.classes) == ("images", "test", ("0", "1", "2"))
    assert data.index.tolist() == list(range(5))


def test_floats_that_are_bytes_divided_by_255_are_stored_as_bytes() -> None:
    data = make_dataset()
    for dtype in (torch.float32, torch.float64):
        again = as_dataset((data.images.to(dtype) / 255, data.labels), num_classes=6)
        assert again.images.dtype == torch.uint8 and again.digest() == data.digest()


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=2)], ids=["dataset", "loader"]
)
def test_torch_data_sets_and_loaders(wrap: Callable[[TensorDataset], object]) -> None:
    images, labels = make_floats()
    data = as_dataset(wrap(TensorDataset(images, labels)), num_classes=4)
    assert (
        torch.equal(data.images, images)
        and torch.equal(data.labels, labels)
        and data.num_classes == 4
    )


def test_reading_a_torch_data_set_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    as_dataset(TensorDataset(*make_floats()))
    assert torch.equal(torch.get_rng_state(), state)


def test_class_names_of_a_torch_data_set_are_kept() -> None:
    source = TensorDataset(*make_floats())
    source.classes = ["cat", "dog", "owl", "rat"]  # type: ignore[attr-defined]
    assert as_dataset(source).classes == ("cat", "dog", "owl", "rat")
    assert as_dataset(DataLoader(source, batch_size=2)).classes == ("cat", "dog", "owl", "rat")


@pytest.mark.parametrize(
    "data", [3, "cifar10", [1, 2], torch.zeros(2, 3, 4, 4), (torch.zeros(2, 3, 4, 4),)]
)
def test_other_data_are_an_error(data: object) -> None:
    with pytest.raises(InputError, match="`data` must be a Dataset, a pair of tensors"):
        as_dataset(data)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.full((2, 3, 4, 4), 200.0), torch.tensor([0, 1]), r"`images` must lie in \[0, 1\]"),
        (torch.zeros(2, 3, 4, 4), torch.tensor([0.0, 1.0]), "`labels` must be whole numbers"),
        (torch.zeros(2, 3, 4, 4), torch.tensor([0]), "`labels` must be as many as the images"),
    ],
)
def test_invalid_tensors_are_an_error(
    images: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        as_dataset((images, labels))
