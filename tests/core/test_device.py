from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

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


def test_two_networks_side_by_side() -> None:
    x = torch.rand(2, 3, 4, 4)
    assert [result.tolist() for result in device.side_by_side(x, torch.neg, torch.square)] == [
        (-x).tolist(),
        (x * x).tolist(),
    ]


class _Stream:
    """Takes note of what it waits for, and of what is on it."""

    log: ClassVar[list[str]] = []
    now = "first"

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        _Stream.now = self.name

    def __exit__(self, *_: object) -> None:
        _Stream.now = "first"


class _OnCuda(torch.Tensor):
    is_cuda = True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU that claims to be a GPU with two streams; the log of what they do."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream("first"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(device, "_second_stream", lambda device: _Stream("second"))
    monkeypatch.setattr(device, "_stays_on_one_stream", threading.Event())
    monkeypatch.setattr(_Stream, "log", [])
    return _Stream.log


def _noted(x: Tensor) -> Tensor:
    _Stream.log.append(f"on {_Stream.now}")
    return x


def test_networks_use_two_streams_in_an_attack_alone(streams: list[str]) -> None:
    x = torch.rand(2, 3).as_subclass(_OnCuda)
    device.side_by_side(x, _noted, _noted)
    assert streams == ["on first", "on first"]
    streams.clear()
    with device.exclusive(torch.device("cuda")):
        device.side_by_side(x, _noted, _noted)
        thread = threading.Thread(
            target=device.side_by_side, args=(x, _noted, _noted)
        )  # not the one that attacks
        thread.start()
        thread.join()
    assert streams == [
        "second waits for first",
        "on first",
        "on second",
        "first waits for second",
        "on first",
        "on first",
    ]


def test_networks_inside_of_others_use_one_stream(streams: list[str]) -> None:
    """A mixture of mixtures: memory of the second stream would be used again too early."""

    def inner(x: Tensor) -> Tensor:
        return device.side_by_side(x, _noted, _noted)[0]

    with device.exclusive(torch.device("cuda")):
        device.side_by_side(torch.rand(2, 3).as_subclass(_OnCuda), inner, inner)
    assert streams == [
        "second waits for first",
        "on first",
        "on first",
        "on second",
        "on second",
        "first waits for second",
    ]


def test_networks_can_be_kept_on_one_stream(streams: list[str]) -> None:
    device.stay_on_one_stream()
    with device.exclusive(torch.device("cuda")):
        device.side_by_side(torch.rand(2, 3).as_subclass(_OnCuda), _noted, _noted)
    assert streams == ["on first", "on first"]


def test_streams_are_joined_after_an_error(streams: list[str]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    x = torch.rand(2, 3).as_subclass(_OnCuda)
    with device.exclusive(torch.device("cuda")):
        with pytest.raises(torch.OutOfMemoryError):
            device.side_by_side(x, fail, _noted)
        assert streams == ["second waits for first", "first waits for second"]
        device.side_by_side(x, _noted, _noted)
    assert "on second" in streams, "the next pass has both again"


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_networks_on_two_streams_give_what_they_give_one_after_the_other(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are equal to the last bit, also where memory is used again at once."""
    monkeypatch.setattr(
        torch.backends.cudnn, "deterministic", True
    )  # else two equal passes differ too
    torch.manual_seed(0)
    first, second = (
        nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3),
            nn.Flatten(),
            nn.Linear(14 * 14 * width, 10),
        )
        .cuda()
        .requires_grad_(False)
        for width in (64, 96)
    )

    def gradient(x: Tensor, beside: bool) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            f, g = (
                device.side_by_side(point, first, second)
                if beside
                else (first(point), second(point))
            )
            return f.detach(), g.detach(), torch.autograd.grad((f * g.exp()).sum(), point)[0]

    images = [torch.rand(64, 3, 16, 16, device="cuda") for _ in range(6)]
    expected = [gradient(x, beside=False) for x in images]
    function: TensorFunction = partial(gradient, beside=True)
    graphs = CudaGraphFunction(function)
    with device.exclusive(images[0].device):
        for x, wanted in zip(images, expected, strict=True):
            outputs = graphs(x) if recorded else function(x)
            assert all(torch.equal(own, other) for own, other in zip(outputs, wanted, strict=True))
    assert len(graphs._graphs) == recorded and None not in graphs._graphs.values()
