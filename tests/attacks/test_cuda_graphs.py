"""Recorded passes: what may not happen while one is recorded."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from equipoise.attacks.cuda_graphs import CudaGraphFunction, without_collection


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


@pytest.mark.gpu
def test_nothing_is_collected_while_a_pass_is_recorded() -> None:
    collecting: list[bool] = []

    def double(x: Tensor) -> tuple[Tensor, ...]:
        collecting.append(gc.isenabled())
        return (2 * x,)

    recorded = CudaGraphFunction(double)
    for number in range(4):
        assert recorded(torch.full((3,), float(number), device="cuda"))[0].tolist() == [2 * number] * 3
    assert collecting == [True, True, False], "a call, one before the recording, and the recorded one"
