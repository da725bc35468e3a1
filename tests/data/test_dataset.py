from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.data.dataset import Dataset, whole_split

CLASSES = tuple("abcdef")


def made(count: int = 11, name: str = "toy") -> Dataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 5, 7), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 6, (count,), generator=generator)
    return whole_split(name, "test", images, labels, CLASSES)


def test_facts() -> None:
    data = made()
    assert (len(data), data.image_shape, data.num_classes) == (11, (3, 5, 7), 6)
    assert data.index.tolist() == list(range(11))


def test_slice_is_exact_and_keeps_positions() -> None:
    data = made()
    part = data.slice(4, 3)
    assert part.index.tolist() == [4, 5, 6]
    assert torch.equal(part.images, data.images[4:7])
    assert torch.equal(part.labels, data.labels[4:7])
    assert part.slice(1, 2).index.tolist() == [5, 6]


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_partition_covers_every_index_once(count: int, data: st.DataObject) -> None:
    whole = made(count)
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
def test_a_slice_outside_is_an_error(start: int, count: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        made().slice(start, count)


def test_take_by_position_and_by_mask() -> None:
    data = made()
    assert data.take(torch.tensor([9, 2])).index.tolist() == [9, 2]
    kept = data.take(data.labels == data.labels[0])
    assert kept.index.tolist() == [row for row, label in enumerate(data.labels.tolist()) if label == data.labels[0]]
    assert len(data.take(torch.zeros(11, dtype=torch.bool))) == 0


def test_digest_sees_every_part() -> None:
    data = made()
    other_pixel, other_label = data.images.clone(), data.labels.clone()
    other_pixel[10, 2, 4, 6] ^= 1
    other_label[10] = (other_label[10] + 1) % 6
    changed = [
        dataclasses.replace(data, images=other_pixel),
        dataclasses.replace(data, labels=other_label),
        dataclasses.replace(data, index=data.index + 1),
        dataclasses.replace(data, images=data.images.reshape(11, 3, 7, 5)),
    ]
    assert len({data.digest(), *(one.digest() for one in changed)}) == 5
    assert dataclasses.replace(data, name="elsewhere").digest() == data.digest()


def test_digest_does_not_depend_on_memory_layout() -> None:
    data = made()
    last = data.images.contiguous(memory_format=torch.channels_last)
    assert dataclasses.replace(data, images=last).digest() == data.digest()


def test_digest_is_stable() -> None:
    images = torch.arange(12, dtype=torch.uint8).reshape(2, 1, 2, 3)
    data = whole_split("toy", "train", images, torch.tensor([1, 0]), ("a", "b"))
    assert data.digest() == "0bd07039b9cf4db35d238da4ae3c2cfcd2a45405da91d6fbeb267717407a30f8"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("images", torch.zeros(11, 3, 5, 7), "`images` must be uint8"),
        ("images", torch.zeros(11, 3, 5, dtype=torch.uint8), r"`images` must have shape \(N, C, H, W\)"),
        ("images", torch.zeros(10, 3, 5, 7, dtype=torch.uint8), "`labels` must be as many as the images"),
        ("labels", torch.full((11,), 6), r"`labels` must lie in 0..5"),
        ("labels", torch.zeros(11, dtype=torch.int32), "`labels` must be int64"),
        ("index", torch.zeros(10, dtype=torch.int64), r"`index` must be int64 of shape \(11,\)"),
        ("index", torch.arange(-1, 10), "`index` must not be negative"),
    ],
)
def test_validated_when_made(field: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(made(), **{field: value})  # type: ignore[arg-type]


def test_a_split_without_images_is_an_error() -> None:
    with pytest.raises(InputError, match="`toy test` must hold at least one image"):
        made(0)
