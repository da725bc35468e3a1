from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.data.batches import Batch, batches, order, pixels, shuffled
from equipoise.data.dataset import Dataset, whole_split


def made(count: int) -> Dataset:
    # The pixels of an image say which one it is, so a row that lost its image would be seen.
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 5, 7).contiguous()
    return whole_split("toy", "train", images, torch.arange(count) % 6, tuple("abcdef"))


def check(batch: Batch) -> None:
    assert batch.images.dtype == torch.float32
    assert torch.equal(batch.images[:, 1, 2, 3].mul(255).round().long(), batch.index)
    assert torch.equal(batch.labels, batch.index % 6)


def test_pixels_are_the_nearest_floats() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    exact = torch.arange(256, dtype=torch.float64) / 255
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(pixels(bytes_, dtype), exact.to(dtype))
    assert (pixels(bytes_)[0].item(), pixels(bytes_)[255].item()) == (0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixels_have_the_same_bits_on_the_gpu() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pixels(bytes_.cuda()).cpu(), pixels(bytes_))


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60))
def test_in_order_every_image_once(count: int, size: int) -> None:
    found = list(batches(made(count), size, device="cpu"))
    assert torch.cat([batch.index for batch in found]).tolist() == list(range(count))
    assert all(len(batch) == size for batch in found[:-1])
    for batch in found:
        check(batch)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 300))
def test_shuffled_every_image_once(count: int, size: int, seed: int, epoch: int) -> None:
    data = made(count)
    kept = list(shuffled(data, size, seed=seed, epoch=epoch, device="cpu"))
    assert sorted(torch.cat([batch.index for batch in kept]).tolist()) == list(range(count))
    for batch in kept:
        check(batch)
    dropped = list(shuffled(data, size, seed=seed, epoch=epoch, device="cpu", drop_last=True))
    assert [len(batch) for batch in dropped] == [size] * (count // size)
    for one, other in zip(dropped, kept, strict=False):
        assert torch.equal(one.index, other.index)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    index = torch.arange(1000)
    first = order(index, seed=0, epoch=0)
    state = torch.get_rng_state()
    assert torch.equal(first, order(index, seed=0, epoch=0))
    assert torch.equal(state, torch.get_rng_state())
    for other in (order(index, seed=1, epoch=0), order(index, seed=0, epoch=1)):
        # Two independent orders agree in about one place.
        assert int((first == other).sum()) < 10
    data = made(200)
    by_size = [torch.cat([b.index for b in shuffled(data, size, seed=5, epoch=2, device="cpu")]) for size in (7, 64)]
    assert torch.equal(*by_size)


def test_the_order_is_uniform() -> None:
    # Where image 0 of 4 lands over many epochs: each place a quarter of 2000, standard deviation 19.
    places = torch.stack([order(torch.arange(4), seed=9, epoch=epoch) for epoch in range(2000)])
    counts = (places == 0).sum(dim=0)
    assert int((counts - 500).abs().max()) < 100


def test_a_slice_is_shuffled_by_its_positions() -> None:
    data = made(30).slice(10, 7)
    found = torch.cat([batch.index for batch in shuffled(data, 3, seed=0, epoch=0, device="cpu")])
    assert sorted(found.tolist()) == list(range(10, 17))


@pytest.mark.parametrize("size", [0, -3])
def test_a_bad_size_is_an_error_before_the_first_batch(size: int) -> None:
    with pytest.raises(InputError, match="`batch_size` must be a whole number of at least 1"):
        batches(made(4), size, device="cpu")
    with pytest.raises(InputError, match="`batch_size` must be a whole number of at least 1"):
        shuffled(made(4), size, seed=0, epoch=0, device="cpu")
