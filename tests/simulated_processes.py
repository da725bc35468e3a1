"""Several processes of a process group, played by threads: collective calls wait for one another as real ones do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from equipoise.core import parallel

T = TypeVar("T")
_SECONDS = 120  # after which a process that waits for another gives up


def run_processes(count: int, work: Callable[[int], T]) -> list[T]:
    """What `work` returns in each of `count` processes, called with the number of the process."""
    barrier, values = threading.Barrier(count, timeout=_SECONDS), [None] * count
    rank_of = threading.local()

    def gather(value: Any) -> list[Any]:
        values[rank_of.value] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered

    def process(rank: int) -> T:
        rank_of.value = rank
        try:
            return work(rank)
        except BaseException:
            barrier.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(parallel, "world", lambda: parallel.World(rank_of.value, count))
        patch.setattr(parallel, "gather", gather)
        patch.setattr(parallel, "barrier", lambda: gather(None) and None)
        return [future.result() for future in [pool.submit(process, rank) for rank in range(count)]]
