"""The running average of weights, gradient clipping, and the statistics of an epoch."""

from __future__ import annotations

import pytest
import torch
from small_training import dataset, network, weights
from torch import nn

from equipoise import models
from equipoise.training import TrainingPlan
from equipoise.training.learner import Forward, Learner, WeightAverage
from equipoise.training.loader import TrainingLoader
from equipoise.training.objectives import Standard


def test_the_average_moves_towards_the_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    average = WeightAverage(model)
    live, averaged = model.state_dict(), average.module.state_dict()
    start = averaged["0.weight"].clone()
    live["0.weight"].add_(1)
    live["1.num_batches_tracked"].add_(5)
    average.update(0.25)
    torch.testing.assert_close(averaged["0.weight"], start + 0.25)
    assert int(averaged["1.num_batches_tracked"]) == 5


def test_frozen_layers_are_copied_bit_by_bit() -> None:
    frozen, trained, norm = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1), nn.BatchNorm2d(2)
    with torch.no_grad():
        frozen.weight[0] = -0.0  # a sign that a sum with zero would lose
        norm.get_buffer("running_mean")[0] = -0.0
    model = nn.Sequential(frozen, norm, trained)
    for layer in (frozen, norm):
        layer.requires_grad_(False)
    before, start = models.weights_digest(model[:2]), trained.weight.detach().clone()
    average = WeightAverage(model)
    with torch.no_grad():
        trained.weight += 1
    average.update(0.25)
    assert isinstance(average.module, nn.Sequential)
    torch.testing.assert_close(average.module.get_parameter("2.weight"), start + 0.25)
    assert models.weights_digest(average.module[:2]) == before


def test_statistics_are_averaged_and_infinite_buffers_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False))
    model.register_buffer("gate", torch.tensor(float("-inf")))
    average = WeightAverage(model)
    model.get_buffer("1.running_mean").fill_(4.0)
    model.get_buffer("1.num_batches_tracked").fill_(7)
    average.update(torch.tensor(0.5))
    buffer = average.module.get_buffer
    assert buffer("1.running_mean").item() == 2.0
    assert buffer("1.num_batches_tracked").item() == 7
    assert buffer("gate").item() == float("-inf")


def test_clip_bounds_the_step() -> None:
    """Gradient descent with learning rate 1 moves the weights by the norm of the gradient, at most
    by `clip`."""
    plan = TrainingPlan(
        epochs=1,
        batch_size=16,
        lr=1.0,
        momentum=0.0,
        weight_decay=0,
        schedule="constant",
        clip=1e-3,
    )
    model, device = network(), torch.device("cpu")
    before, loader = weights(model), TrainingLoader(dataset(16), plan, device)
    batch = next(loader.batches(0, 0))
    Learner(model, plan, device, {}).take_step(
        Standard(), batch, loader.stream(0, batch.index), loader.schedule(0)
    )
    moved = torch.cat(
        [(value - before[key]).flatten() for key, value in weights(model).items()]
    ).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


def test_statistics_of_an_epoch() -> None:
    plan, device = TrainingPlan(batch_size=16), torch.device("cpu")
    loader, learner = (
        TrainingLoader(dataset(32), plan, device),
        Learner(network(), plan, device, {}),
    )
    for step, batch in enumerate(loader.batches(0, 0)):
        learner.take_step(Standard(), batch, loader.stream(0, batch.index), loader.schedule(step))
    statistics = learner.read_statistics()
    assert (
        statistics.loss > 0
        and 0 <= statistics.accuracy <= 1
        and statistics.first_nonfinite_step is None
    )
    learner.reset_statistics()
    assert learner.read_statistics().loss == 0


def test_only_networks_of_the_zoo_are_trained_with_channels_last() -> None:
    """A user's network may flatten with `.view`, which needs contiguous activations."""
    plan, cuda = TrainingPlan(precision="bf16"), torch.device("cuda")
    own = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    zoo = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8))
    assert not Forward(own, plan, cuda, False).channels_last
    assert own.get_parameter("0.weight").is_contiguous()
    assert Forward(zoo, plan, cuda, False).channels_last
