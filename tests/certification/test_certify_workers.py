"""Batches in several threads: the same votes, and nothing of it remains."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from closed_form import chance
from torch import Tensor, nn

from equipoise.certification import Engine, SmoothingPlan, certify
from equipoise.certification.sampler import hands

CPU = torch.device("cpu")


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Nosy(nn.Module):
    """Remembers under which circumstances it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 3)
        self.seen: set[tuple[object, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        mine = threading.current_thread() is threading.main_thread()
        if len(x) > 1:
            self.seen.add((mine, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()))
        logits: Tensor = self.fc(x.flatten(1)) * 9
        return logits


@pytest.mark.parametrize("plan", [SmoothingPlan(0.3, samples=900, n0=30), SmoothingPlan(0.3, samples=900, n0=30, tolerance=0.05),
                                  SmoothingPlan(0.3, samples=300, n0=30, soft=True)])
def test_the_same_as_one_thread(two: None, plan: SmoothingPlan) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Nosy().eval()
    x = torch.rand(5, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    several = certify(model, x, plan=plan, stream=chance(5), engine=Engine(batch_size=16))
    assert model.seen == {(False, False, False, 1)} and torch.get_num_threads() == 2
    model.seen.clear()
    torch.set_num_threads(1)
    alone = certify(model, x, plan=plan, stream=chance(5), engine=Engine(batch_size=16))
    assert model.seen == {(True, False, False, 1)}
    assert torch.equal(alone.votes, several.votes) and torch.equal(alone.radius, several.radius)


def test_circumstances_are_handed_on(two: None) -> None:
    def circumstances(rows: slice) -> tuple[bool, bool, torch.dtype]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad(), hands(CPU) as (spread, ahead):
        assert ahead == 8
        assert list(spread(circumstances, [slice(0, 2), slice(2, 4)])) == [(False, True, torch.float16)] * 2
    with hands(CPU) as (spread, _):
        assert next(spread(circumstances, [slice(0, 2)]))[:2] == (True, False)


def test_a_mistake_in_a_thread_arrives(two: None) -> None:
    with pytest.raises(ZeroDivisionError), hands(CPU) as (spread, _):
        list(spread(lambda rows: 1 // rows.start, [slice(1, 2), slice(0, 1)]))
    assert torch.get_num_threads() == 2
