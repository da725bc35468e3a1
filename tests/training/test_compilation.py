"""Captured steps and their random streams give the same results as plain ones; and what is compiled
when."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_training import dataset, network

from equipoise.core import rng
from equipoise.core.checks import InputError
from equipoise.models import build
from equipoise.training import Objective, TrainingPlan, fit_model
from equipoise.training.compilation import (
    CapturedSteps,
    GraphStream,
    KeyTable,
    compile_mode,
    cudnn_benchmark,
)
from equipoise.training.learner import Learner
from equipoise.training.loader import TrainingLoader
from equipoise.training.objectives import IAAT, Adversarial, SmoothMix, Standard
from equipoise.training.objectives.gate import GateLoss, PolicyLoss

PLAN = TrainingPlan(epochs=2, batch_size=14, lr=0.02, held_out=0, pad=1, flip=True, ema=0.9)
OBJECTIVES: list[Objective] = [
    SmoothMix(noises=2, steps=2),
    IAAT(steps=2, warmup_epochs=1),
    Adversarial(steps=2),
    Adversarial(steps=2, for_mixing=True),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_graph_streams_draw_the_numbers_of_plain_streams() -> None:
    index = torch.tensor([3, 2**40, 11, 0])
    table = KeyTable(rng.stream(5, "train", index))
    for epoch in (0, 1):
        base = rng.stream(5, "train", index).at("epoch", epoch)
        table.set_base(base)
        stream = GraphStream(0, index, table)
        assert torch.equal(stream.at("noise").normal(3, 5), base.at("noise").normal(3, 5))
        assert torch.equal(stream.at("a", 1).at("b").uniform(7), base.at("a", 1).at("b").uniform(7))
        assert torch.equal(stream[1:3].to("cpu").integers(9, 2), base[1:3].integers(9, 2))
        assert torch.equal(stream.uniform(), base.uniform())
    assert len(table.keys) == 3


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_the_captured_step_is_the_plain_step(objective: Objective) -> None:
    loader = TrainingLoader(dataset(70), PLAN, CPU)
    plain, captured = (
        Learner(network(), PLAN, CPU, objective.initial_memory(70)) for _ in range(2)
    )
    steps = CapturedSteps(captured, loader)
    for epoch in range(2):
        current = objective.at_epoch(epoch, 2)
        for step, batch in enumerate(
            loader.batches(epoch, 0), start=epoch * loader.steps_per_epoch
        ):
            plain.take_step(
                current, batch, loader.stream(epoch, batch.index), loader.schedule(step)
            )
        steps.load_epoch(epoch)
        with captured.undo_steps():
            steps.take_step(current)
        steps.position.zero_()
        for _ in range(steps.full_batches):
            steps.take_step(current)
    assert all(
        torch.equal(one, two) for one, two in zip(plain.tensors(), captured.tensors(), strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
@pytest.mark.parametrize("captured", ["graph", "both"])
@pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores", "ignore:The .grad attribute"
)  # of torch's compiler
def test_a_captured_run_is_the_plain_run(captured: str, objective: Objective) -> None:
    """Up to rounding: kernels may add in another order."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    weights = []
    for mode in ("off", captured):
        plan = dataclasses.replace(PLAN, compile=mode, batch_size=16)
        model = fit_model(network(), objective, dataset(70), plan, device="cuda")
        weights.append([p.detach().cpu() for p in model.parameters()])
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "processes", "small", "large"),
    [(CPU, 1, "off", "off"), (CUDA, 1, "graph", "both"), (CUDA, 2, "model", "model")],
)
def test_steps_are_captured_in_one_process_and_large_networks_compiled(
    device: torch.device, processes: int, small: str, large: str
) -> None:
    networks = (network(), build("resnet18", num_classes=4, image_shape=(3, 8, 8)))
    modes = [
        compile_mode(TrainingPlan(), model, Standard(), device, processes) for model in networks
    ]
    assert modes == [small, large]


def test_images_that_do_not_fit_on_the_device_are_not_read_by_a_graph() -> None:
    assert (
        compile_mode(TrainingPlan(), network(), Standard(), CUDA, 1, has_room_for_epoch=False)
        == "model"
    )


@pytest.mark.parametrize(
    "objective", [GateLoss(), PolicyLoss()], ids=lambda objective: objective.name
)
def test_objectives_that_cannot_be_compiled(objective: Objective) -> None:
    """Their numbers of steps are drawn on the host, and a compiled model is no mixture any more."""
    assert compile_mode(TrainingPlan(), network(), objective, CUDA, 1) == "off"
    with pytest.raises(
        InputError, match=f"`compile` must be auto or off for the objective {objective.name}"
    ):
        compile_mode(TrainingPlan(compile="model"), network(), objective, CUDA, 1)


def test_cudnn_times_its_algorithms_in_steps_and_not_in_validations() -> None:
    before = torch.backends.cudnn.benchmark
    with cudnn_benchmark(CUDA):
        assert torch.backends.cudnn.benchmark
        with cudnn_benchmark(CUDA, enabled=False):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    with cudnn_benchmark(CPU, enabled=not before):
        assert torch.backends.cudnn.benchmark == before
