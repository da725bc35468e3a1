"""Fast steps on a GPU: one CUDA graph per step, and torch.compile for large networks.

Networks for small images spend most of their time on a GPU waiting for kernel launches. A CUDA graph
holds the whole step: the attack, the gradient, the update and the statistics. The number of the
batch, the schedule and the keys of the random streams are read from the device, so that an epoch is
one call per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from equipoise.core import checks, rng
from equipoise.core.rng import Stream
from equipoise.training.learner import Learner
from equipoise.training.loader import AUGMENT_AT_ONCE, StepBatch, TrainingLoader
from equipoise.training.objective import Objective, StepSchedule, TrainingPlan

Purposes = tuple[tuple[int | str, ...], ...]  # the arguments of successive calls of `Stream.at`
SMALL = 2_000_000  # parameters; below, compiling takes longer than it saves


def compile_mode(
    plan: TrainingPlan,
    model: nn.Module,
    objective: Objective,
    device: torch.device,
    processes: int,
    has_room_for_epoch: bool = True,
) -> str:
    """What is compiled or captured: off, model, graph or both.

    A graph reads the augmented images of an epoch from the device, where those of a large data set
    may not fit.
    """
    if device.type != "cuda":
        return "off"
    if not objective.compilable:
        checks.require(
            plan.compile in ("auto", "off"),
            "compile",
            f"be auto or off for the objective {objective.name}, which cannot be compiled",
            plan.compile,
        )
        return "off"
    if plan.compile == "auto":
        if processes > 1 or not has_room_for_epoch:
            return "model"
        return "graph" if sum(p.numel() for p in model.parameters()) < SMALL else "both"
    checks.require(
        processes == 1 or plan.compile in ("off", "model"),
        "compile",
        "be off or model under several processes",
        plan.compile,
    )
    return plan.compile


@contextmanager
def cudnn_benchmark(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Let cuDNN time its algorithms on a GPU, once for every size of a batch, or not."""
    before = torch.backends.cudnn.benchmark
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class CapturedSteps:
    """The full batches of an epoch, replayed from a CUDA graph; a smaller last batch is left to the
    caller."""

    def __init__(self, learner: Learner, loader: TrainingLoader) -> None:
        self.learner, self.loader = learner, loader
        size, device = loader.plan.batch_size, loader.device
        self.full_batches = len(loader) // size
        self.images = torch.empty_like(loader.images[: self.full_batches * size], device=device)
        self.rows = torch.zeros(self.full_batches * size, dtype=torch.int64, device=device)
        self.position = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # of the next step in the epoch
        # Of each step of the epoch: its number, learning rate, and weight of the average.
        self.schedule = torch.zeros(self.full_batches, 3, dtype=torch.float64, device=device)
        self.keys = KeyTable(loader.stream(0, loader.index[:size]))
        self.captured: tuple[Objective, torch.cuda.CUDAGraph] | None = None

    def load_epoch(self, epoch: int) -> None:
        """Write the images, schedule and random keys of an epoch to the device, and go to its first
        step."""
        loader, size = self.loader, self.loader.plan.batch_size
        self.rows.copy_(loader.order(epoch)[: len(self.rows)])
        for low in range(0, len(self.rows), AUGMENT_AT_ONCE):
            part = self.rows[low : low + AUGMENT_AT_ONCE]
            self.images[low : low + len(part)] = loader.augmented(part, epoch)
        first = epoch * loader.steps_per_epoch
        steps = [loader.schedule(step) for step in range(first, first + self.full_batches)]
        self.schedule.copy_(torch.tensor([astuple(step) for step in steps], dtype=torch.float64))
        self.keys.set_base(loader.stream(epoch, loader.index[:size]))
        self.position.zero_()

    def capture(self, objective: Objective) -> torch.cuda.CUDAGraph:
        """Capture the step of this objective, unless it is captured already."""
        if self.captured is not None and self.captured[0] == objective:
            return self.captured[1]
        self.captured = None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with self.learner.undo_steps():
            with torch.cuda.stream(side):
                self.position.zero_()
                for _ in range(min(3, self.full_batches)):
                    self.take_step(objective)
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.take_step(objective)
        self.captured = (objective, graph)
        return graph

    def replay(self, objective: Objective, first: int, count: int) -> None:
        """Take the steps first … first + count − 1 of the epoch."""
        graph = self.capture(objective)
        self.position.fill_(first)
        for _ in range(count):
            graph.replay()

    def take_step(self, objective: Objective) -> None:
        """The step that is captured: reads everything from the device, and goes on to the next
        position."""
        size = self.loader.plan.batch_size
        selected = self.position * size + torch.arange(size, device=self.loader.device)
        rows = self.rows.index_select(0, selected)
        number, rate, weight = self.schedule.index_select(0, self.position.view(1))[0].unbind()
        index = self.loader.index.index_select(0, rows)
        batch = StepBatch(
            self.images.index_select(0, selected),
            self.loader.labels.index_select(0, rows),
            rows,
            index,
            size,
        )
        schedule = StepSchedule(number, rate.float(), weight.float())
        self.learner.take_step(objective, batch, GraphStream(0, index, self.keys), schedule)
        self.position.add_(1)


class KeyTable:
    """Keys by purpose, on the device; all purposes are relative to one base stream."""

    def __init__(self, base: Stream) -> None:
        self.base = base
        self.keys: dict[Purposes, Tensor] = {}
        generators: list[Callable[..., Tensor]] = [rng.random_words, rng.random_normals]
        if base.index.is_cuda:
            generators = [torch.compile(generator, dynamic=False) for generator in generators]
        self.random_words, self.random_normals = generators

    def set_base(self, base: Stream) -> None:
        """Rewrite all keys, in place, for another base stream (whose images do not matter)."""
        self.base = base
        for purposes, key in self.keys.items():
            key.copy_(self._key(purposes))

    def key(self, purposes: Purposes) -> Tensor:
        """(2,) the words of a key; a new purpose can only occur outside of a capture."""
        if purposes not in self.keys:
            self.keys[purposes] = self._key(purposes)
        return self.keys[purposes]

    def _key(self, purposes: Purposes) -> Tensor:
        stream = self.base
        for purpose in purposes:
            stream = stream.at(*purpose)
        return rng.key_words(stream.key, stream.index.device)


@dataclass(frozen=True)
class GraphStream(Stream):
    """The stream `table.base.at(*purposes[0]).at(*purposes[1])…` of the images `index`, with its
    key on the device."""

    table: KeyTable
    purposes: Purposes = ()

    def at(self, *words: int | str) -> GraphStream:
        """See :meth:`Stream.at`."""
        return GraphStream(self.key, self.index, self.table, (*self.purposes, words))

    def words(self, *shape: int) -> Tensor:
        """See :meth:`Stream.words`."""
        key, size = self.table.key(self.purposes), math.prod(shape)
        return self.table.random_words(key, self.index, size).reshape(len(self), *shape)

    def normal(self, *shape: int) -> Tensor:
        """See :meth:`Stream.normal`."""
        key, size = self.table.key(self.purposes), math.prod(shape)
        return self.table.random_normals(key, self.index, size).reshape(len(self), *shape)
