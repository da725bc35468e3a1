from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.core.checks import InputError
from equipoise.models import Normalize, Normalized


def images(channels: int = 3) -> torch.Tensor:
    return torch.rand(4, channels, 5, 7, generator=torch.Generator().manual_seed(0))


def test_layer_standardises_every_channel() -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 1.0]
    x = images()
    out = Normalize(mean, std)(x)
    for channel in range(3):
        expected = (x[:, channel].double() - mean[channel]) / std[channel]
        torch.testing.assert_close(out[:, channel].double(), expected, atol=1e-6, rtol=1e-6)


def test_without_mean_and_std_images_pass_unchanged() -> None:
    assert torch.equal(Normalized(3).normalize(images()), images())


def test_nothing_is_clamped() -> None:
    assert Normalize([0.0], [1.0])(torch.full((1, 1, 2, 2), 1.7)).max() == pytest.approx(1.7)


def test_mean_and_std_are_buffers_at_the_root() -> None:
    module = Normalize([0.1, 0.2], [1.0, 0.5])
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == {
        "mean": (1, 2, 1, 1),
        "std": (1, 2, 1, 1),
    }
    assert not list(module.parameters())
    assert module.double().mean.dtype == torch.float64


def test_composes_with_any_network() -> None:
    net = nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), nn.Flatten())
    torch.testing.assert_close(net(images()), (images() * 2 - 1).flatten(1))


def test_another_number_of_channels_is_not_broadcast() -> None:
    with pytest.raises(InputError, match="`images` must have 3 channels"):
        Normalize([0.5] * 3, [0.5] * 3)(images(1))


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.5, 0.5], [1.0], "`std` must hold 2 numbers"),
        ([0.5], [0.0], "`std` must lie in"),
        ([0.5], [-1.0], "`std` must lie in"),
        ([0.5], [62.0], "`std` must lie in"),
        ([125.0], [0.5], "`mean` must lie in"),
        ([float("nan")], [1.0], "`mean` must be finite"),
    ],
)
def test_bad_numbers_are_refused(mean: list[float], std: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Normalize(mean, std)
