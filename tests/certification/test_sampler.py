"""Samples are a function of image and sample number, whatever batches and threads compute them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from closed_form import Bins, images, random_stream
from torch import Tensor, nn

from equipoise.certification import Sampler, SamplerOptions, SmoothingPlan, certify
from equipoise.certification.sampler import workers

THREE = Bins((0.1, 0.6, 0.9))
PLAN = SmoothingPlan(0.3, samples=300, n0=30, failure=0.01)
CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class ThreadRecorder(nn.Module):
    """Records whether it runs in the main thread, with gradients, with autocast, and with how many
    threads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 3)
        self.calls: set[tuple[object, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        is_main = threading.current_thread() is threading.main_thread()
        if len(x) > 1:
            self.calls.add(
                (
                    is_main,
                    torch.is_grad_enabled(),
                    torch.is_autocast_enabled("cpu"),
                    torch.get_num_threads(),
                )
            )
        logits: Tensor = self.fc(x.flatten(1)) * 9
        return logits


def test_purposes_draw_different_samples() -> None:
    sampler = Sampler(THREE, images(50), random_stream(50), PLAN)
    zero = torch.zeros(50, dtype=torch.int64)
    assert not torch.equal(
        sampler.votes("select", zero, zero + 30), sampler.votes("estimate", zero, zero + 30)
    )


def test_ranges_of_samples_add_up() -> None:
    sampler = Sampler(THREE, images(5), random_stream(5), PLAN, SamplerOptions(batch_size=13))
    start, stop = torch.tensor([0, 3, 7, 7, 20]), torch.tensor([5, 3, 40, 8, 90])
    middle = torch.tensor([2, 3, 30, 7, 21])
    both = sampler.votes("estimate", start, middle) + sampler.votes("estimate", middle, stop)
    assert torch.equal(both, sampler.votes("estimate", start, stop))
    assert torch.equal(both.sum(dim=1), stop - start)


def test_drawn_samples_are_reported() -> None:
    drawn: list[int] = []
    sampler = Sampler(
        THREE,
        images(5),
        random_stream(5),
        PLAN,
        SamplerOptions(batch_size=16, on_samples=drawn.append),
    )
    zero = torch.zeros(5, dtype=torch.int64)
    sampler.votes("estimate", zero, zero + 20)
    assert sum(drawn) == 100


@pytest.mark.parametrize(
    "plan",
    [
        SmoothingPlan(0.3, samples=900, n0=30),
        SmoothingPlan(0.3, samples=900, n0=30, tolerance=0.05),
        SmoothingPlan(0.3, samples=300, n0=30, certificate="soft"),
    ],
)
def test_threads_do_not_change_votes(two_threads: None, plan: SmoothingPlan) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ThreadRecorder().eval()
    x = torch.rand(5, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    several = certify(
        model, x, plan=plan, stream=random_stream(5), options=SamplerOptions(batch_size=16)
    )
    assert model.calls == {(False, False, False, 1)} and torch.get_num_threads() == 2
    model.calls.clear()
    torch.set_num_threads(1)
    single = certify(
        model, x, plan=plan, stream=random_stream(5), options=SamplerOptions(batch_size=16)
    )
    assert model.calls == {(True, False, False, 1)}
    assert torch.equal(single.votes, several.votes) and torch.equal(single.radius, several.radius)


def test_workers_inherit_the_modes_of_the_caller(two_threads: None) -> None:
    def modes(rows: slice) -> tuple[bool, bool, torch.dtype]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    with (
        torch.autocast("cpu", dtype=torch.float16),
        torch.no_grad(),
        workers(CPU) as (map_batches, batches_ahead),
    ):
        assert batches_ahead == 8
        assert (
            list(map_batches(modes, [slice(0, 2), slice(2, 4)]))
            == [(False, True, torch.float16)] * 2
        )
    with workers(CPU) as (map_batches, _):
        assert next(map_batches(modes, [slice(0, 2)]))[:2] == (True, False)


def test_errors_in_workers_are_raised(two_threads: None) -> None:
    with pytest.raises(ZeroDivisionError), workers(CPU) as (map_batches, _):
        list(map_batches(lambda rows: 1 // rows.start, [slice(1, 2), slice(0, 1)]))
    assert torch.get_num_threads() == 2
