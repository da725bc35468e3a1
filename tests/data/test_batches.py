from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.data.dataset import Batch, Dataset, batches, order, pixels, whole_split


def make_dataset(count: int) -> Dataset:
    # The pixels of an image are its index, so that a mixed-up row would be noticed.
    images = (
        torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 5, 7).contiguous()
    )
    return whole_split("toy", "train", images, torch.arange(count) % 6, tuple("abcdef"))


def check(batch: Batch) -> None:
    assert batch.images.dtype == torch.float32
    assert torch.equal(batch.images[:, 1, 2, 3].mul(255).round().long(), batch.index)
    assert torch.equal(batch.labels, batch.index % 6)


def test_pixels_are_the_nearest_floats() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    exact = torch.arange(256, dtype=torch.float64) / 255
    assert torch.equal(pixels(bytes_), exact.float())
    assert (pixels(bytes_)[0].item(), pixels(bytes_)[255].item()) == (0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixels_have_the_same_bits_on_the_gpu() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pixels(bytes_.cuda()).cpu(), pixels(bytes_))


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60))
def test_in_order_every_image_once(count: int, size: int) -> None:
    result = list(batches(make_dataset(count), size, device="cpu"))
    assert torch.cat([batch.index for batch in result]).tolist() == list(range(count))
    assert all(len(batch) == size for batch in result[:-1])
    for batch in result:
        check(batch)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**40), st.integers(0, 300))
def test_the_order_holds_every_row_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(order(torch.arange(count), seed=seed, epoch=epoch).tolist()) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    index = torch.arange(1000)
    first = order(index, seed=0, epoch=0)
    state = torch.get_rng_state()
    assert torch.equal(first, order(index, seed=0, epoch=0))
    assert torch.equal(state, torch.get_rng_state())
    for other in (order(index, seed=1, epoch=0), order(index, seed=0, epoch=1)):
        # Two independent orders agree in about one position.
        assert int((first == other).sum()) < 10


def test_the_order_is_uniform() -> None:
    # The position of image 0 of 4 over many epochs: each position a quarter of 2000, standard
    # deviation 19.
    positions = torch.stack([order(torch.arange(4), seed=9, epoch=epoch) for epoch in range(2000)])
    counts = (positions == 0).sum(dim=0)
    assert int((counts - 500).abs().max()) < 100


def test_the_order_of_a_slice_depends_on_its_positions() -> None:
    assert not torch.equal(
        order(torch.arange(40), seed=0, epoch=0), order(torch.arange(10, 50), seed=0, epoch=0)
    )


def test_floats_in_0_to_1_stay_as_they_are() -> None:
    images = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pixels(images), images)
    dataset = whole_split("toy", "train", images, torch.zeros(2), ("a",))
    assert torch.equal(next(batches(dataset, 2, device="cpu")).images, images)


@pytest.mark.parametrize("size", [0, -3])
def test_a_bad_size_is_an_error_before_the_first_batch(size: int) -> None:
    with pytest.raises(InputError, match="`batch_size` must be a whole number of at least 1"):
        batches(make_dataset(4), size, device="cpu")
