from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.core import device
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions

CPU = torch.device("cpu")


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that claims bfloat16 and is stopped by the first such instruction."""
    device.has_bf16.cache_clear()
    monkeypatch.setattr(
        device, "BF16_TRIAL", f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"
    )
    yield
    device.has_bf16.cache_clear()


def test_a_cpu_that_traps_is_one_sentence(trap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    real = subprocess.run

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **settings)

    monkeypatch.setattr(subprocess, "run", counted)
    sentence = (
        "`precision` must be auto or fp32 on this cpu, which cannot compute in bfloat16, got 'bf16'"
    )
    with pytest.raises(InputError, match=sentence):
        device.autocast("bf16", CPU)
    with pytest.raises(InputError, match="bfloat16"):
        Conditions(Threat("linf", 0.1), CPU, precision="bf16")
    with pytest.raises(InputError, match="bfloat16"):
        GradientSource(torch.nn.Flatten(), GradientSettings(), "bf16", torch.rand(2, 3, 5, 7))
    assert len(calls) == 1, "tried once"
    for name in ("auto", "fp32"):
        assert isinstance(device.autocast(name, CPU), nullcontext)
    assert device.has_bf16("cuda"), "only CPUs lie about it"


def test_a_cpu_that_has_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device.has_bf16.cache_clear()
    monkeypatch.setattr(device, "BF16_TRIAL", "pass")
    with device.autocast("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")
    device.has_bf16.cache_clear()


def test_the_trial_says_what_this_machine_does() -> None:
    """In a process of its own; whatever the answer, this process lives."""
    assert device.has_bf16("cpu") in (True, False)


def test_one_thread_inside_and_as_many_as_before_outside() -> None:
    before = torch.get_num_threads()
    with device.single_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
