"""Streams whose key lies on the device give the numbers of the streams they stand for."""

from __future__ import annotations

import torch

from equipoise.core import rng
from equipoise.training.graph_rng import GraphStream, KeyTable


def test_the_numbers_of_the_stream_it_stands_for() -> None:
    index = torch.tensor([3, 2**40, 11, 0])
    table = KeyTable(torch.device("cpu"), compiled=False)
    for epoch in (0, 1):
        base = rng.stream(5, "train", index).at("epoch", epoch)
        table.begin(base)
        keyed = GraphStream(0, index, table)
        assert torch.equal(keyed.at("noise").normal(3, 5), base.at("noise").normal(3, 5))
        assert torch.equal(keyed.at("a", 1).at("b").uniform(7), base.at("a", 1).at("b").uniform(7))
        assert torch.equal(keyed[1:3].to("cpu").integers(9, 2), base[1:3].integers(9, 2))
        assert torch.equal(keyed.uniform(), base.uniform())
    assert len(table.paths) == 3
