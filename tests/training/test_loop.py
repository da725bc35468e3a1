"""The training loop: it learns, validates, and stops at losses that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import METADATA, PLAN, dataset, network, same, weights
from torch import Tensor, nn

from equipoise import models
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream
from equipoise.training import Objective, ObjectiveOutput, TrainingPlan, fit_model
from equipoise.training.learner import Learner
from equipoise.training.objective import Memory
from equipoise.training.objectives import Standard


def test_learns_and_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    plan = TrainingPlan(epochs=15, batch_size=16, lr=0.05, held_out=30)
    model, data = fit_model(network(), Standard(), dataset(), plan), dataset()
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    with torch.no_grad():
        assert float((model(data.images / 255).argmax(dim=1) == data.labels).float().mean()) > 0.95
    assert all(p.grad is None for p in model.parameters())


class CountingObjective(Standard):
    """Counts how often each image was used."""

    name = "counting"

    def initial_memory(self, count: int) -> Memory:
        return {"times": torch.zeros(count), "pairs": torch.zeros(count, 2)}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        output = super().__call__(model, x, y, stream, memory)
        return dataclasses.replace(
            output, memory={name: value + 1 for name, value in memory.items()}
        )


def test_memory_of_every_image_is_updated_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = []
    take_step = Learner.take_step

    def recorded(self: Learner, *arguments: Any) -> None:
        learners.append(self)
        take_step(self, *arguments)

    monkeypatch.setattr(Learner, "take_step", recorded)
    fit_model(network(), CountingObjective(), dataset(), PLAN)
    assert len(learners) == 15
    assert learners[-1].memory["times"].eq(3).all() and learners[-1].memory["pairs"].shape == (
        70,
        2,
    )
    assert learners[-1].memory["pairs"].eq(3).all()


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            InputError,
            "`batch_size` must fit into the memory of this cpu",
        ),
        (RuntimeError("another error"), RuntimeError, "another error"),
    ],
)
def test_out_of_memory_names_the_batch_size(
    error: RuntimeError, expected: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Learner, "take_step", fail)
    with pytest.raises(expected, match=message):
        fit_model(network(), Standard(), dataset(), PLAN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergingObjective(Standard):
    """Its loss is NaN from a given epoch on."""

    name = "diverging"
    nan_epoch: int = 1
    is_nan: bool = False

    def at_epoch(self, epoch: int, epochs: int) -> DivergingObjective:
        return dataclasses.replace(self, is_nan=epoch >= self.nan_epoch)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        output = super().__call__(model, x, y, stream, memory)
        return dataclasses.replace(
            output, losses=output.losses * (float("nan") if self.is_nan else 1.0)
        )


def test_a_diverged_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"got NaN or infinity at step 5 \(epoch 1\); the last good checkpoint"
    ):
        fit_model(
            network(),
            DivergingObjective(),
            dataset(),
            PLAN,
            out=tmp_path / "run",
            metadata=METADATA,
        )
    last = models.load(str(tmp_path / "run" / "last.safetensors"))
    assert all(value.isfinite().all() for value in weights(last).values())
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["progress"]["step"] == 5


def test_a_diverged_run_keeps_the_best_epoch_since_the_last_save(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, save_seconds=1e6)
    with pytest.raises(InputError, match=r"the last good checkpoint in .* was kept"):
        fit_model(
            network(),
            DivergingObjective(),
            dataset(),
            plan,
            out=tmp_path / "run",
            metadata=METADATA,
        )
    best = models.load(str(tmp_path / "run" / "best.safetensors"))
    assert all(value.isfinite().all() for value in weights(best).values())


def test_a_run_that_diverges_at_once_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"at step 0 \(epoch 0\); no checkpoint had been saved"):
        fit_model(
            network(),
            DivergingObjective(nan_epoch=0),
            dataset(),
            dataclasses.replace(PLAN, save_seconds=1e6),
            out=tmp_path / "run",
            metadata=METADATA,
        )
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_without_held_out_images_the_last_epoch_is_the_best(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, held_out=0)
    model = fit_model(
        network(), Standard(), dataset(), plan, out=tmp_path / "run", metadata=METADATA
    )
    assert same(weights(models.load(str(tmp_path / "run" / "best.safetensors"))), weights(model))


@pytest.mark.parametrize("setting", [{"pad": 2}, {"cutout": 3}], ids=["pad", "cutout"])
def test_objectives_that_detect_attacks_refuse_blank_pixels(setting: dict[str, int]) -> None:
    class Detector(Standard):
        name = "detector"
        detects_attacks = True

    objective: Objective = Detector()
    with pytest.raises(
        InputError, match="must be 0 for the objective detector, which learns to detect attacks"
    ):
        fit_model(network(), objective, dataset(), TrainingPlan(epochs=1, batch_size=16, **setting))  # type: ignore[arg-type]
