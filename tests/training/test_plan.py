"""Training plans and learning-rate schedules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.training.objective import TrainingPlan, downgrade_precision

PER_EPOCH = 10


def rates(plan: TrainingPlan) -> list[float]:
    return [
        float(plan.schedule_at(step, PER_EPOCH).learning_rate)
        for step in range(plan.epochs * PER_EPOCH)
    ]


def test_step_schedule_drops_by_its_factor() -> None:
    plan = TrainingPlan(epochs=6, lr=1.0, schedule="step", step_epochs=2)
    assert rates(plan) == pytest.approx([1.0] * 20 + [0.1] * 20 + [0.01] * 20)


def test_step_schedule_with_late_drops() -> None:
    """The official SmoothMix code steps its scheduler after epoch e with e: epoch e has the factor
    of epoch e − 1."""
    plan = TrainingPlan(epochs=8, lr=1.0, schedule="step", step_epochs=3, step_delay=1)
    official = [0.1 ** (max(epoch - 1, 0) // 3) for epoch in range(8) for _ in range(PER_EPOCH)]
    assert rates(plan) == pytest.approx(official) and rates(plan)[39:41] == [1.0, 0.1]


def test_cosine_halves_in_the_middle_and_ends_near_zero() -> None:
    values = rates(TrainingPlan(epochs=4, lr=0.5, schedule="cosine"))
    assert values[0] == 0.5 and values[20] == pytest.approx(0.25)
    assert values == sorted(values, reverse=True) and 0 < values[-1] < 0.01
    assert values[10] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)) / 2)


def test_one_cycle_rises_a_third_and_falls_to_zero() -> None:
    values = rates(TrainingPlan(epochs=9, lr=0.4, schedule="one-cycle"))
    assert max(values) == pytest.approx(0.4) and values.index(max(values)) in (29, 30)
    assert values[14] == pytest.approx(0.2) and values[60] == pytest.approx(0.2)
    assert values[-1] == pytest.approx(0.4 / 60)


def test_one_cycle_with_a_given_rise() -> None:
    values = rates(TrainingPlan(epochs=9, lr=0.4, schedule="one-cycle", warmup=2))
    assert values.index(max(values)) in (19, 20)


def test_warmup_rises_to_the_schedule() -> None:
    values = rates(TrainingPlan(epochs=4, lr=1.0, schedule="constant", warmup=1))
    assert values[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and set(
        values[10:]
    ) == {1.0}


@pytest.mark.parametrize(("step", "weight"), [(0, 0.9), (10_000, 1 - 0.99)])
def test_the_average_forgets_the_initial_weights(step: int, weight: float) -> None:
    assert TrainingPlan(ema=0.99).schedule_at(step, PER_EPOCH).average_weight == weight


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"momentum": 1.0, "optimizer": "adamw"}, "`momentum` must be less than 1 for adamw"),
        ({"momentum": 0.0, "nesterov": True}, "`momentum` must be positive for nesterov"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingPlan(**settings)  # type: ignore[arg-type]


def test_identity_leaves_out_what_only_changes_the_speed() -> None:
    plan = TrainingPlan(lr=0.2)
    assert dataclasses.replace(plan, compile="off", save_seconds=1.0).identity() == plan.identity()
    assert dataclasses.replace(plan, lr=0.3).identity() != plan.identity()


def test_bf16_becomes_fp32_on_a_cpu() -> None:
    with pytest.warns(UserWarning, match="bf16 is for GPUs; training in fp32 on this CPU"):
        assert (
            downgrade_precision(TrainingPlan(precision="bf16"), torch.device("cpu")).precision
            == "fp32"
        )


@pytest.mark.parametrize(
    ("precision", "device"), [("bf16", "cuda"), ("auto", "cpu"), ("fp32", "cpu")]
)
def test_other_precisions_stay(precision: str, device: str) -> None:
    plan = TrainingPlan(precision=precision)
    assert downgrade_precision(plan, torch.device(device)) is plan
