"""Recorded passes: what may not happen while one is recorded."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from equipoise.attacks.cuda_graphs import CudaGraphFunction, without_collection
from equipoise.core import device


def test_nothing_is_collected_within_the_context() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="cannot be recorded"), without_collection():
        assert not gc.isenabled()
        raise RuntimeError("cannot be recorded")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class _FailingGraph:
    """A recording whose end fails after an error."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            raise RuntimeError("unjoined work")


@pytest.fixture
def _failing_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which recording begins and then fails."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", _FailingGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("_failing_recording")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("a copy to the host")]
)
def test_a_recording_that_fails(error: RuntimeError) -> None:
    """Without memory the attack has to halve its batch; whatever else cannot be recorded is called
    as it is."""

    def fail(x: Tensor) -> tuple[Tensor, ...]:
        raise error

    function = CudaGraphFunction(fail)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            function._record((torch.ones(1),))
    else:
        assert function._record((torch.ones(1),)) is None


@pytest.mark.gpu
def test_a_recording_that_fails_keeps_no_memory() -> None:
    """A mixture with a base that copies to the host: its passes go on without being recorded."""
    weight = torch.rand(64, 64, device="cuda")

    def host(x: Tensor) -> Tensor:
        return x @ weight * (1 + float(x.detach().sum() > 0))

    def gradient(x: Tensor) -> tuple[Tensor, ...]:
        point = x.detach().requires_grad_()
        return torch.autograd.grad(((point @ weight) * host(point)).sum(), point)

    function, x = CudaGraphFunction(gradient), torch.rand(4096, 64, device="cuda")
    with device.exclusive(x.device):
        for _ in range(5):
            function(x)
        before = torch.cuda.memory_allocated()
        for _ in range(100):
            function(x)
    assert torch.cuda.memory_allocated() == before and list(function._graphs.values()) == [None]


@pytest.mark.gpu
def test_nothing_is_collected_while_a_pass_is_recorded() -> None:
    collecting: list[bool] = []

    def double(x: Tensor) -> tuple[Tensor, ...]:
        collecting.append(gc.isenabled())
        return (2 * x,)

    recorded = CudaGraphFunction(double)
    for number in range(4):
        assert (
            recorded(torch.full((3,), float(number), device="cuda"))[0].tolist() == [2 * number] * 3
        )
    assert collecting == [True, True, False], "two calls, and the recorded one"
