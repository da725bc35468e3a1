from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.data.dataset import crop, flip

DTYPES = [torch.float32, torch.uint8]


def make_images(dtype: torch.dtype, count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 256, (count, 3, 5, 7), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pad", [0, 1, 4, 9])
def test_crop_equals_a_plain_loop(dtype: torch.dtype, pad: int) -> None:
    x = make_images(dtype)
    random_stream = stream(1, "augment", torch.arange(100, 140))
    corners = random_stream.at("crop").integers(2 * pad + 1, 2).tolist()
    expected = torch.zeros_like(x)
    for image, (top, left) in enumerate(corners):
        for row in range(5):
            for column in range(7):
                y, z = row + top - pad, column + left - pad
                if 0 <= y < 5 and 0 <= z < 7:
                    expected[image, :, row, column] = x[image, :, y, z]
    cropped = crop(x, pad, random_stream)
    assert cropped.dtype == dtype
    assert torch.equal(cropped, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flip_equals_a_plain_loop(dtype: torch.dtype) -> None:
    x = make_images(dtype)
    random_stream = stream(1, "augment", torch.arange(40))
    coins = random_stream.at("flip").integers(2).tolist()
    expected = torch.stack(
        [image.flip(2) if coin else image for image, coin in zip(x, coins, strict=True)]
    )
    assert {0, 1} == set(coins)
    assert torch.equal(flip(x, random_stream), expected)


def test_random_numbers_belong_to_the_image() -> None:
    x = make_images(torch.float32)
    random_stream = stream(2, "augment", torch.arange(40))
    rows = torch.tensor([31, 4, 17])
    assert torch.equal(crop(x[rows], 3, random_stream[rows]), crop(x, 3, random_stream)[rows])
    assert torch.equal(flip(x[rows], random_stream[rows]), flip(x, random_stream)[rows])


def test_every_window_and_both_sides_are_equally_likely() -> None:
    random_stream = stream(3, "augment", torch.arange(9000))
    x = torch.zeros(9000, 1, 3, 3)
    x[:, :, 1, 1] = 1
    # Nine windows: the mark of each image lands on one of nine pixels; standard deviation of a
    # count is 30.
    counts = crop(x, 1, random_stream).sum(dim=(0, 1))
    assert counts.sum() == 9000
    assert float((counts - 1000).abs().max()) < 150
    edge = torch.zeros(9000, 1, 1, 2)
    edge[..., 0] = 1
    assert (
        abs(float(flip(edge, random_stream)[..., 1].sum()) - 4500) < 240
    )  # five standard deviations


def test_crop_and_flip_are_independent() -> None:
    random_stream = stream(4, "augment", torch.arange(2000))
    side = random_stream.at("crop").integers(2, 2)[:, 1] == 1
    mirrored = random_stream.at("flip").integers(2) == 1
    assert abs(float((side == mirrored).float().mean()) - 0.5) < 0.06


def test_inputs_and_the_global_random_state_are_unchanged() -> None:
    x = make_images(torch.float32)
    before, state = x.clone(), torch.get_rng_state()
    random_stream = stream(5, "augment", torch.arange(40))
    flip(crop(x, 2, random_stream), random_stream)
    assert torch.equal(x, before)
    assert torch.equal(state, torch.get_rng_state())


def test_negative_padding_is_an_error() -> None:
    with pytest.raises(InputError, match="`pad` must be a whole number of at least 0, got -1"):
        crop(make_images(torch.float32), -1, stream(0, "augment", torch.arange(40)))
