"""A whole epoch of a small network without its launches: the step is captured once and replayed.

On a GPU a LeNet spends its time being told what to do. A CUDA graph holds the step with the adversary, the
gradient, the update and the tally; which batch it is, the learning rate and the chance are read from the
device, so that an epoch is one call per step.
"""

from __future__ import annotations

import torch

from equipoise.training import ema, schedules
from equipoise.training.graph_rng import GraphStream, KeyTable
from equipoise.training.learner import Learner
from equipoise.training.loader import AHEAD, StepBatch, TrainingLoader
from equipoise.training.objective import Objective

REHEARSALS = 3


class CapturedSteps:
    """The full batches of an epoch, replayed; a smaller last batch is left to the caller."""

    def __init__(self, learner: Learner, feed: TrainingLoader) -> None:
        self.learner, self.feed = learner, feed
        size, device = feed.plan.batch_size, feed.device
        self.full = len(feed) // size
        self.images = torch.empty_like(feed.images[: self.full * size], device=device)
        self.rows = torch.zeros(self.full * size, dtype=torch.int64, device=device)
        self.place = torch.zeros((), dtype=torch.int64, device=device)
        self.within = torch.arange(size, device=device)
        # Of each step of the epoch: learning rate, weight of the average, number of the step.
        self.times = torch.zeros(self.full, 3, dtype=torch.float64, device=device)
        self.table = KeyTable(device, compiled=True)
        self.graph: tuple[Objective, torch.cuda.CUDAGraph] | None = None

    def begin(self, epoch: int) -> None:
        """Lay out an epoch on the device."""
        feed, size = self.feed, self.feed.plan.batch_size
        self.rows.copy_(feed.order(epoch)[: len(self.rows)])
        for low in range(0, len(self.rows), AHEAD):
            part = self.rows[low : low + AHEAD]
            self.images[low : low + len(part)] = feed.look(part, epoch)
        steps = range(epoch * feed.steps, epoch * feed.steps + self.full)
        self.times.copy_(torch.tensor([[schedules.rate(feed.plan, step, feed.steps), ema.share(feed.plan.ema, step),
                                        float(step)] for step in steps], dtype=torch.float64))
        self.table.begin(feed.chance(epoch, feed.index[:size]))

    def ready(self, objective: Objective) -> None:
        """Capture the step of this objective, unless it has been."""
        if self.graph is not None and self.graph[0] == objective:
            return
        self.graph, learner = None, self.learner
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with learner.rehearsal():
            with torch.cuda.stream(side):
                self.place.zero_()
                for _ in range(min(REHEARSALS, self.full)):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = (objective, graph)

    def run(self, first: int, count: int) -> None:
        """Steps first … first + count − 1 of the epoch."""
        if self.graph is None:
            raise RuntimeError("a step is captured before it runs")
        self.place.fill_(first)
        for _ in range(count):
            self.graph[1].replay()

    def _step(self) -> None:
        size = self.feed.plan.batch_size
        pick = self.place * size + self.within
        rows = self.rows.index_select(0, pick)
        rate, follow, step = self.times.index_select(0, self.place.view(1))[0].unbind()
        index = self.feed.index.index_select(0, rows)
        share = StepBatch(self.images.index_select(0, pick), self.feed.labels.index_select(0, rows), rows, index, size)
        self.learner.learn(share, GraphStream(0, index, self.table), rate=rate.float(), follow=follow.float(), step=step)
        self.place.add_(1)
