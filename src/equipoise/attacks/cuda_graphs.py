"""A function of fixed shapes, recorded once as a CUDA graph and replayed: no launch costs per
step."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MAX_GRAPHS = 4  # per function; a graph holds on to its memory
# Calls with the same shapes that are not recorded: TorchScript compiles in its second pass.
FIRST_CALLS = 2
TensorFunction = Callable[..., tuple[Tensor, ...]]
Recorded = tuple[
    torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]
]  # graph, its inputs, its outputs


class CudaGraphFunction:
    """Calls `function` on tensors; on CUDA the third call with the same shapes records, later ones
    replay.

    Anything that cannot be recorded (a model that copies to the host, or branches on values) is
    simply called, as on the CPU. Dropping the object frees its graphs. Functions that never run at
    the same time can share the memory of a `pool`, which is a `torch.cuda.graph_pool_handle()`.
    """

    def __init__(self, function: TensorFunction, pool: Any = None) -> None:
        self.function, self.pool = function, pool
        self._graphs: dict[object, Recorded | None] = {}
        self._calls: Counter[object] = Counter()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `function` returns."""
        if inputs[0].device.type != "cuda":
            return self.function(*inputs)
        key = tuple((value.shape, value.dtype, value.stride()) for value in inputs)
        if self._calls[key] < FIRST_CALLS:
            self._calls[key] += 1
            return self.function(*inputs)
        if key not in self._graphs:
            while len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._record(inputs)
        recorded = self._graphs[key]
        if recorded is None:
            return self.function(*inputs)
        graph, buffers, outputs = recorded
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def _record(self, inputs: tuple[Tensor, ...]) -> Recorded | None:
        buffers = [value.detach().clone() for value in inputs]
        try:
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                # A model that computes on the host raises an error, and before that the graph warns
                # that it is empty.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                # The stream is restored also where the end of the recording fails. Other threads
                # may allocate memory meanwhile.
                with (
                    without_collection(),
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
                ):
                    outputs = self.function(*buffers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            if isinstance(
                error.__context__, torch.OutOfMemoryError
            ):  # after which the recording could not end either
                raise error.__context__ from None
            return None
        return graph, buffers, outputs


@contextmanager
def without_collection() -> Iterator[None]:
    """A context without garbage collection: graphs that it would free may not be freed while
    another is recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
