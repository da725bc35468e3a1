from __future__ import annotations

import math

import pytest

from equipoise.core.checks import InputError
from equipoise.training import TrainingPlan
from equipoise.training.schedules import rate

PER_EPOCH = 10


def rates(plan: TrainingPlan) -> list[float]:
    return [rate(plan, step, PER_EPOCH) for step in range(plan.epochs * PER_EPOCH)]


def test_step_schedule_drops_by_its_factor() -> None:
    found = rates(TrainingPlan(epochs=6, lr=1.0, schedule="step", step_epochs=2))
    assert found == pytest.approx([1.0] * 20 + [0.1] * 20 + [0.01] * 20)


def test_cosine_halves_in_the_middle_and_ends_near_zero() -> None:
    found = rates(TrainingPlan(epochs=4, lr=0.5, schedule="cosine"))
    assert found[0] == 0.5 and found[20] == pytest.approx(0.25)
    assert found == sorted(found, reverse=True) and 0 < found[-1] < 0.01
    assert found[10] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)) / 2)


def test_one_cycle_rises_a_third_and_falls_to_zero() -> None:
    found = rates(TrainingPlan(epochs=9, lr=0.4, schedule="one-cycle"))
    assert max(found) == pytest.approx(0.4) and found.index(max(found)) in (29, 30)
    assert found[14] == pytest.approx(0.2) and found[60] == pytest.approx(0.2)
    assert found[-1] == pytest.approx(0.4 / 60)
    early = rates(TrainingPlan(epochs=9, lr=0.4, schedule="one-cycle", warmup=2))
    assert early.index(max(early)) in (19, 20)


def test_warmup_rises_to_the_schedule() -> None:
    found = rates(TrainingPlan(epochs=4, lr=1.0, schedule="constant", warmup=1))
    assert found[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and set(found[10:]) == {1.0}


def test_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        TrainingPlan(schedule="cosin")
