from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import generator
from equipoise.attacks import Square, attack_dataset, square
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.search_state import SearchState
from equipoise.attacks.square_patches import Window, make_bumps
from equipoise.core import rng
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
    data = Dataset(
        "grey",
        "test",
        images,
        torch.zeros(3, dtype=torch.int64),
        torch.arange(3),
        ("dark", "bright"),
    )
    state = attack_dataset(Square(500), Stepped(), data, threat=Threat("linf", 0.1), seed=0)
    assert not bool(state.survived.any())


class NanBetweenBytes(nn.Module):
    """Class 0 for images of bytes, and NaN for everything between them."""

    def forward(self, x: Tensor) -> Tensor:
        between = ((x * 255 - (x * 255).round()).abs() > 1e-3).flatten(1).any(dim=1, keepdim=True)
        logits = torch.tensor([1.0, 0, 0, 0, 0, 0]).expand(len(x), 6) + 0 * x.flatten(1).sum(
            1, keepdim=True
        )
        return torch.where(between, torch.nan, logits)


def test_nan_is_no_success() -> None:
    images = torch.randint(80, 170, (8, 3, 5, 7), generator=generator(1), dtype=torch.uint8)
    data = Dataset(
        "random",
        "test",
        images,
        torch.zeros(8, dtype=torch.int64),
        torch.arange(8),
        tuple("abcdef"),
    )
    with pytest.raises(InputError, match="not contain NaN"):
        attack_dataset(
            Square(queries=3),
            NanBetweenBytes(),
            data,
            threat=Threat("linf", 0.1),
            seed=0,
            batch_size=8,
        )


def test_bumps_have_length_one_and_vanish_outside_their_side() -> None:
    bumps = make_bumps([3, 5], 5, 7, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(bumps.square().sum(dim=(1, 2)), torch.ones(2, dtype=torch.float64))
    assert not bumps[0, 3:].any() and not bumps[0, :, 3:].any()


def test_windows_are_squares_at_uniform_places() -> None:
    words = rng.stream(0, "square", torch.arange(40)).words(30, 2)
    side = torch.tensor([2, 3]).repeat(15).expand(40, -1)
    windows = Window.draw(words, side, 5, 7)
    for query in range(30):
        own = windows.select((slice(None), query))
        mask = own.mask()
        assert (
            mask.shape == (40, 1, 5, 7)
            and mask.sum(dim=(1, 2, 3)).tolist() == (side[:, query] ** 2).tolist()
        )
        for row, (top, left) in enumerate(zip(own.top.tolist(), own.left.tolist(), strict=True)):
            edge = int(side[row, query])
            assert bool(mask[row, 0, top : top + edge, left : left + edge].all())
    for edge, tops, lefts in ((2, 4, 6), (3, 3, 5)):
        assert windows.top[side == edge].unique().tolist() == list(range(tops))
        assert windows.left[side == edge].unique().tolist() == list(range(lefts))


@pytest.mark.parametrize("threat", [Threat("linf", 0.05), Threat("l2", 0.3)], ids=str)
def test_patches_shrink_after_ten_queries_and_take_their_mass_elsewhere(threat: Threat) -> None:
    x, stream = (
        torch.rand(16, 3, 32, 32, generator=generator(0)),
        rng.stream(0, "square", torch.arange(16)),
    )
    source = GradientSource(
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)).eval(), GradientSettings(), "fp32", x
    )
    search = square.SEARCHES[threat.norm](source, threat, Square(100), 0, True)
    proposed: list[Any] = []

    def propose(state: SearchState, patches: Any) -> Tensor:
        proposed.append(patches)
        return state.nearest

    search.propose = propose  # type: ignore[method-assign]
    search.advance(
        search.start(x, torch.zeros(16, dtype=torch.int64), stream), stream, [0] * 16, 14
    )
    edges = [patches.window.rows.sum(dim=1).unique().tolist() for patches in proposed]
    first, second = (
        29,
        20 if threat.norm == "linf" else 21,
    )  # of 0.8 and 0.4 of 1024 pixels; in ℓ2 odd
    assert edges == [[first]] * 12 + [[second]] * 2, "the start, queries 0 to 10, and the next"
    if threat.norm == "l2":
        assert not all(torch.equal(patches.window.top, patches.emptied.top) for patches in proposed)


class Counting(nn.Module):
    """A small network with random weights that counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.passes = nn.Linear(3 * 6 * 6, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return torch.tanh(self.layer(x.flatten(1)))


def test_images_that_are_fooled_need_no_more_queries() -> None:
    model, x = Counting(), torch.rand(16, 3, 6, 6, generator=generator(0))
    y, before = (model(x).argmax(dim=1) + 1) % 4, model.passes  # all are misclassified
    Square(1000)(
        model, x, y, threat=Threat("linf", 0.05), stream=rng.stream(0, "square", torch.arange(16))
    )
    assert model.passes - before < 20


def test_images_that_share_a_random_stream_are_all_attacked() -> None:
    model, x = Counting(), torch.rand(16, 3, 6, 6, generator=generator(0))
    y, threat = model(x).argmax(dim=1), Threat("linf", 0.1)
    shared = rng.stream(0, "square", torch.zeros(16, dtype=torch.int64))
    together = Square(150)(model, x, y, threat=threat, stream=shared)
    alone = torch.cat(
        [
            Square(150)(
                model,
                x[row : row + 1],
                y[row : row + 1],
                threat=threat,
                stream=shared[row : row + 1],
            )
            for row in range(16)
        ]
    )
    assert torch.equal(together, alone) and not torch.equal(together[1:], x[1:])
    twins = Square(150)(model, x[[3, 3]], y[[3, 3]], threat=threat, stream=shared[:2])
    assert torch.equal(twins[0], twins[1]) and torch.equal(twins[0], alone[3])
