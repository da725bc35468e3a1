from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import generator
from equipoise.attacks import Square, attack_dataset
from equipoise.attacks.square import make_bumps, window_mask
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset


class Stepped(nn.Module):
    """Class 1 from a mean pixel of 0.55 on; a tie, which goes to class 0, from 0.53 to there."""

    def forward(self, x: Tensor) -> Tensor:
        bright = torch.floor((x.mean(dim=(1, 2, 3)) - 0.53) / 0.02).clamp(-1, 1)
        return torch.stack([torch.zeros_like(bright), bright], dim=1)


def test_search_goes_on_from_a_tie() -> None:
    images = torch.full((3, 1, 6, 7), 128, dtype=torch.uint8)
    data = Dataset("grey", "test", images, torch.zeros(3, dtype=torch.int64), torch.arange(3), ("dark", "bright"))
    state = attack_dataset(Square(500), Stepped(), data, threat=Threat("linf", 0.1), seed=0)
    assert not bool(state.survived.any())


class NanBetweenBytes(nn.Module):
    """Class 0 for images of bytes, and NaN for everything between them."""

    def forward(self, x: Tensor) -> Tensor:
        between = ((x * 255 - (x * 255).round()).abs() > 1e-3).flatten(1).any(dim=1, keepdim=True)
        logits = torch.tensor([1.0, 0, 0, 0, 0, 0]).expand(len(x), 6) + 0 * x.flatten(1).sum(1, keepdim=True)
        return torch.where(between, torch.nan, logits)


def test_nan_is_no_success() -> None:
    images = torch.randint(80, 170, (8, 3, 5, 7), generator=generator(1), dtype=torch.uint8)
    data = Dataset("random", "test", images, torch.zeros(8, dtype=torch.int64), torch.arange(8), tuple("abcdef"))
    with pytest.raises(InputError, match="not contain NaN"):
        attack_dataset(Square(queries=3), NanBetweenBytes(), data, threat=Threat("linf", 0.1), seed=0, batch_size=8)


def test_bumps_have_length_one_and_vanish_outside_their_side() -> None:
    bumps = make_bumps([3, 5], 5, 7, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(bumps.square().sum(dim=(1, 2)), torch.ones(2, dtype=torch.float64))
    assert not bumps[0, 3:].any() and not bumps[0, :, 3:].any()


def test_window_mask_is_the_square_of_every_row() -> None:
    mask = window_mask(torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([2, 3]), 5, 7)
    assert mask.shape == (2, 1, 5, 7) and mask.sum(dim=(1, 2, 3)).tolist() == [4, 9]
    assert bool(mask[0, 0, 1:3, 2:4].all()) and bool(mask[1, 0, :3, :3].all())
