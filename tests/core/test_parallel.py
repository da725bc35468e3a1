from __future__ import annotations

import functools
import operator

import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.core import parallel
from equipoise.core.parallel import World


@given(st.integers(1, 7), st.integers(0, 40))
def test_every_row_goes_to_one_process(size: int, count: int) -> None:
    shards = [World(rank, size).shard(torch.arange(count)).tolist() for rank in range(size)]
    assert sorted(functools.reduce(operator.iadd, shards, [])) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_alone() -> None:
    with parallel.process_group(torch.device("cpu")) as world:
        assert world == World(0, 1) and world.is_leader
        assert parallel.gather("x") == ["x"]
        parallel.barrier()
