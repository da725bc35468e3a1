"""Attacks made once, and attacks on what is left."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.studies.local_attacks import CachedAttack, FallbackAttack

THREAT = Threat("linf", 0.5)


class _Bright(nn.Module):
    """Class 1 above a mean of one half."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(dim=1)
        return torch.stack((0.5 - mean, mean - 0.5), dim=1)


class _Shift:
    """Adds a number and remembers how many images it was shown."""

    def __init__(self, by: float) -> None:
        self.by, self.shown = by, [0]

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        self.shown.append(len(x))
        return x + self.by + 1e-3 * stream.uniform(*x.shape[1:])


def _images() -> tuple[Tensor, Tensor, Stream]:
    x = torch.tensor([0.1, 0.2, 0.45, 0.3]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    return x, torch.zeros(4, dtype=torch.long), rng.stream(0, "some attack", torch.tensor([5, 6, 7, 8]))


def test_the_second_attack_meets_only_what_stands() -> None:
    x, y, stream = _images()
    second = _Shift(0.4)
    x_adv = FallbackAttack(_Shift(0.1), second)(_Bright(), x, y, threat=THREAT, stream=stream)
    assert second.shown == [0, 3]  # the third image had fallen
    assert (x_adv - x)[2].max() < 0.2 and (x_adv - x)[[0, 1, 3]].min() >= 0.4
    # The chance of an image is its own, whoever stands beside it.
    alone = FallbackAttack(_Shift(0.1), _Shift(0.4))(_Bright(), x[3:], y[3:], threat=THREAT, stream=stream[3:])
    assert torch.equal(alone, x_adv[3:])


def test_nothing_standing_needs_no_second_attack() -> None:
    x, y, stream = _images()
    second = _Shift(0.4)
    FallbackAttack(_Shift(0.45), second)(_Bright(), x, y, threat=THREAT, stream=stream)
    assert second.shown == [0]


def test_images_are_made_once_with_the_same_chance_whoever_asks() -> None:
    x, y, stream = _images()
    attack = _Shift(0.1)
    once = CachedAttack(attack, seed=3)
    first = once(_Bright(), x, y, threat=THREAT, stream=stream)
    again = once(_Bright(), x, y, threat=THREAT, stream=stream.at("another attack"))
    assert torch.equal(first, again) and attack.shown == [0, 4]
    assert torch.equal(CachedAttack(_Shift(0.1), seed=3)(_Bright(), x, y, threat=THREAT, stream=stream.at("other")), first)
    once(_Bright(), x[:2], y[:2], threat=THREAT, stream=stream[:2])
    assert attack.shown == [0, 4, 2]
