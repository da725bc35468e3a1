from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks.cuda_graphs import CudaGraphFunction, TensorFunction
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
    monkeypatch.setattr(device, "BF16_TRIAL", f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})")
    yield
    device.has_bf16.cache_clear()


def test_a_cpu_that_traps_is_one_sentence(trap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    real = subprocess.run

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **settings)

    monkeypatch.setattr(subprocess, "run", counted)
    sentence = "`precision` must be auto or fp32 on this cpu, which cannot compute in bfloat16, got 'bf16'"
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


def test_two_networks_side_by_side() -> None:
    x = torch.rand(2, 3, 4, 4)
    assert [result.tolist() for result in device.side_by_side(x, torch.neg, torch.square)] == [
        (-x).tolist(), (x * x).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_networks_on_two_streams_give_what_they_give_one_after_the_other(
        recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are equal to the last bit, also where memory is used again at once."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else two equal passes differ too
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3),
                                   nn.Flatten(), nn.Linear(14 * 14 * width, 10)).cuda().requires_grad_(False)
                     for width in (64, 96))

    def gradient(x: Tensor, beside: bool) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            f, g = device.side_by_side(point, first, second) if beside else (first(point), second(point))
            return f.detach(), g.detach(), torch.autograd.grad((f * g.exp()).sum(), point)[0]

    images = [torch.rand(64, 3, 16, 16, device="cuda") for _ in range(6)]
    expected = [gradient(x, beside=False) for x in images]
    function: TensorFunction = partial(gradient, beside=True)
    function = CudaGraphFunction(function) if recorded else function
    for x, wanted in zip(images, expected, strict=True):
        assert all(torch.equal(own, other) for own, other in zip(function(x), wanted, strict=True))
