"""A function of fixed shapes, recorded once as a CUDA graph and replayed: no launch costs per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEPT = 4  # shapes; a graph holds on to its memory
Pass = Callable[..., tuple[Tensor, ...]]


class CudaGraphFunction:
    """Calls `function` on tensors; on CUDA the second call of the same shapes records, later ones replay.

    Anything that cannot be recorded (a model that copies to the host, or branches on values) is simply
    called, as on the CPU.
    """

    def __init__(self, function: Pass, pool: list[Any]) -> None:
        """`pool` holds the memory that all graphs of one attack share; they never run at the same time."""
        self.function, self.pool = function, pool
        self.recorded: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]] | None] = {}
        self.seen: set[object] = set()

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What `function` returns."""
        given = [value for value in inputs if value is not None]
        if not given or given[0].device.type != "cuda":
            return self.function(*inputs)
        key = tuple((tuple(value.shape), value.dtype, value.stride()) if value is not None else None
                    for value in inputs)
        if key not in self.seen:  # a shape that comes only once is not worth a graph
            self.seen.add(key)
            return self.function(*inputs)
        if key not in self.recorded:
            while len(self.recorded) >= KEPT:
                del self.recorded[next(iter(self.recorded))]
            self.recorded[key] = self._record(inputs)
        kept = self.recorded[key]
        if kept is None:
            return self.function(*inputs)
        graph, places, outputs = kept
        for place, value in zip(places, given, strict=True):
            place.copy_(value)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def forget(self) -> None:
        """Drop what was recorded, and the memory it holds."""
        self.recorded.clear()
        self.seen.clear()

    def _record(
        self, inputs: tuple[Tensor | None, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]] | None:
        places = [None if value is None else value.detach().clone() for value in inputs]
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.function(*places)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if not self.pool:
                self.pool.append(torch.cuda.graph_pool_handle())
            with torch.cuda.graph(graph, pool=self.pool[0]):
                outputs = self.function(*places)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph, [place for place in places if place is not None], outputs
