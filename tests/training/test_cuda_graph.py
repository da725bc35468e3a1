"""The step that a CUDA graph replays makes the same weights as the plain one, bit by bit where arithmetic allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from equipoise import models
from equipoise.data.dataset import Dataset
from equipoise.training import Objective, TrainingPlan, cuda_graph, ema, graph_rng, schedules, train
from equipoise.training.learner import Learner
from equipoise.training.loader import TrainingLoader
from equipoise.training.objectives import Adversarial, Iaat, SmoothMix

PLAN = TrainingPlan(epochs=2, batch_size=14, lr=0.02, held_out=0, pad=1, flip=True, ema=0.9)
OBJECTIVES: list[Objective] = [SmoothMix(noises=2, steps=2), Iaat(steps=2, warmup_epochs=1), Adversarial(steps=2)]


def dataset() -> Dataset:
    chance = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (70, 1, 6, 5), generator=chance, dtype=torch.uint8)
    return Dataset("noise", "train", images, torch.arange(70) % 2, torch.arange(70) + 7, ("up", "down"))


def learner(objective: Objective) -> tuple[Learner, TrainingLoader]:
    model = models.build("cnn_small", num_classes=2, image_shape=(1, 6, 5))
    device = torch.device("cpu")
    return Learner(model, PLAN, device, objective.memory(70), compiled=False), TrainingLoader(dataset(), PLAN, device)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_the_step_read_from_the_device_is_the_plain_step(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "KeyTable", lambda device, compiled: graph_rng.KeyTable(device, compiled=False))
    plain, feed = learner(objective)
    told, _ = learner(objective)
    steps = cuda_graph.CapturedSteps(told, feed)
    for epoch in range(2):
        now = objective.at(epoch, 2)
        plain.begin(now)
        for step, share in enumerate(feed.shares(epoch, 0), start=epoch * feed.steps):
            plain.learn(share, feed.chance(epoch, share.index), rate=schedules.rate(PLAN, step, feed.steps),
                        follow=ema.share(PLAN.ema, step), step=step)
        told.begin(now)
        steps.begin(epoch)
        steps.place.zero_()
        with told.rehearsal():
            steps._step()
        steps.place.zero_()
        for _ in range(steps.full):
            steps._step()
    assert all(torch.equal(one, two) for one, two in zip(plain.tensors(), told.tensors(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_a_captured_run_is_the_plain_run(objective: Objective) -> None:
    """To rounding: kernels may add in another order."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = []
    for how in ("off", "graph"):
        model = models.build("cnn_small", num_classes=2, image_shape=(1, 6, 5))
        train(model, objective, dataset(), dataclasses.replace(PLAN, compile=how, batch_size=16), device="cuda")
        found.append([p.detach().cpu() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
