"""Streams whose key lies on the device give the numbers of the streams they stand for."""

from __future__ import annotations

import torch

from equipoise import rng
from equipoise.train.keyed import Keyed, Table


def test_the_numbers_of_the_stream_it_stands_for() -> None:
    index = torch.tensor([3, 2**40, 11, 0])
    table = Table(torch.device("cpu"), compiled=False)
    for epoch in (0, 1):
        base = rng.stream(5, "train", index).at("epoch", epoch)
        table.begin(base)
        keyed = Keyed(0, index, table)
        assert torch.equal(keyed.at("noise").normal(3, 5), base.at("noise").normal(3, 5))
        assert torch.equal(keyed.at("a", 1).at("b").uniform(7), base.at("a", 1).at("b").uniform(7))
        assert torch.equal(keyed[1:3].to("cpu").integers(9, 2), base[1:3].integers(9, 2))
        assert torch.equal(keyed.uniform(), base.uniform())
    assert len(table.paths) == 3
