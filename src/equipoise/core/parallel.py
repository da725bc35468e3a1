"""Distributed processes; a single process is a world of size 1.

`--processes` starts them on one machine (:mod:`equipoise.core.launch`), `torchrun` on several, with
`torchrun --nproc-per-node 2 -m -- equipoise evaluate …`. There the `--` ends the options of
`torchrun`, which would otherwise take those of the command for abbreviations of its own.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core import checks, launch

TIMEOUT = timedelta(days=7)  # shards may differ in duration by hours; the first to finish waits
_groups = itertools.count()  # each has a file of its own
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Which process this is, and how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def shard(self, rows: Tensor) -> Tensor:
        """Every `size`-th row: each row goes to exactly one process, and loads stay even."""
        return rows[self.rank :: self.size]


@contextmanager
def process_group(device: torch.device) -> Iterator[World]:
    """Join the process group that the environment describes, if there is one."""
    if processes_started() == 1 or dist.is_initialized():
        yield world()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl", timeout=TIMEOUT)
    elif (path := launch.meeting_file()) is None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        # Through a port, a process that comes before the first one waits long to try again.
        store = dist.FileStore(f"{path}-{next(_groups)}", processes_started())  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=processes_started(),
            timeout=TIMEOUT,
        )
    try:
        yield world()
    finally:
        gc.collect()  # a DDP module in a reference cycle must be freed before its process group
        dist.destroy_process_group()


def require_one_process(work: str) -> None:
    """Refuse work that is not divided among processes, in each of them and before any waits for
    another."""
    size = max(world().size, processes_started())
    checks.require(size == 1, work, "run in one process, without torchrun", f"{size} processes")


def processes_started() -> int:
    """The number of processes that were started together."""
    text = os.environ.get("WORLD_SIZE", "1")
    checks.require(
        text.isascii() and text.isdigit() and int(text) > 0,
        "WORLD_SIZE",
        "be a number of processes",
        text,
    )
    return int(text)


def world() -> World:
    """Rank and number of processes."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


def barrier() -> None:
    """Wait until every process is here."""
    if dist.is_initialized():
        dist.barrier()


def any_process(value: bool, device: torch.device) -> bool:
    """Whether the value is true in any process; waits for all of them, and for the device."""
    if not dist.is_initialized():
        return value
    flag = torch.tensor(float(value), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def gather(value: T) -> list[T]:
    """The value of every process, in rank order, on every process."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [item for item in values if item is not None]
