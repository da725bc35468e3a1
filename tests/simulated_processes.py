"""Several processes of a process group, played by threads: collective calls wait for one another as
real ones do."""

from __future__ import annotations

import pickle
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
    barrier, values = threading.Barrier(count, timeout=_SECONDS), [b""] * count
    rank_of = threading.local()

    def gather(value: Any, kind: str = "gather") -> list[Any]:
        values[rank_of.value] = pickle.dumps((kind, value))
        barrier.wait()
        gathered = [pickle.loads(content) for content in values]
        barrier.wait()
        assert {other for other, _ in gathered} == {kind}, "processes wait for different calls"
        return [value for _, value in gathered]

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
        patch.setattr(parallel, "barrier", lambda: gather(None, "barrier") and None)
        futures = [pool.submit(process, rank) for rank in range(count)]
        errors = [
            error for error in (future.exception() for future in futures) if error is not None
        ]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error  # the cause, not that of the others that waited
        return [future.result() for future in futures]
