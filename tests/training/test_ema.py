"""The average of weights."""

from __future__ import annotations

import torch
from torch import nn

from equipoise import models
from equipoise.training.ema import Average, share


def test_the_average_follows_what_learns_and_copies_what_is_frozen_bit_by_bit() -> None:
    frozen, learning = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)
    norm = nn.BatchNorm2d(2)
    with torch.no_grad():
        frozen.weight[0] = -0.0  # a sign that a sum with zero would lose
        norm.get_buffer("running_mean")[0] = -0.0
    model = nn.Sequential(frozen, norm, learning)
    for layer in (frozen, norm):
        layer.requires_grad_(False)
    before, start = models.weights_digest(model[:2]), learning.weight.detach().clone()
    average = Average(model)
    with torch.no_grad():
        learning.weight += 1
    average.follow(0.25)
    kept = average.module
    assert isinstance(kept, nn.Sequential)
    torch.testing.assert_close(kept.get_parameter("2.weight"), start + 0.25)
    assert models.weights_digest(kept[:2]) == before


def test_statistics_without_weights_of_their_own_follow_and_infinite_buffers_are_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False))
    model.register_buffer("gate", torch.tensor(float("-inf")))
    average = Average(model)
    model.get_buffer("1.running_mean").fill_(4.0)
    model.get_buffer("1.num_batches_tracked").fill_(7)
    average.follow(torch.tensor(0.5))
    kept = average.module.get_buffer
    assert kept("1.running_mean").item() == 2.0
    assert kept("1.num_batches_tracked").item() == 7
    assert kept("gate").item() == float("-inf")


def test_the_start_is_forgotten_soon() -> None:
    assert share(0.99, 0) == 0.9
    assert share(0.99, 10_000) == 1 - 0.99
