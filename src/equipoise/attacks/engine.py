"""The driver of all attacks: runs stage after stage, each on the images that survived the previous
ones."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise.attacks.attack_state import CLEAN, AttackState
from equipoise.attacks.gradients import VERDICT_BLOCK, GradientSettings, GradientSource
from equipoise.attacks.prepared import PreparedNetworks
from equipoise.attacks.search import run_searches
from equipoise.attacks.search_state import AttackBatch, BatchShape, Search, SearchResult
from equipoise.core import checks, device, memory, progress
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

T = TypeVar("T")
# Gradient source, threat, stop_at_success → the search; None if the model has too few classes for
# it.
MakeSearch = Callable[[GradientSource, Threat, bool], Search[Any] | None]


@dataclass(frozen=True)
class Stage:
    """One run of one algorithm, as the driver schedules it and rows name it."""

    name: str  # in rows and reports; different for all stages of an attack
    make_search: MakeSearch
    cost: float  # in passes with a gradient, for the progress bar
    # Only images with less than this share of their clean logit margin are attacked
    margin_ratio_below: float | None
    gradients: GradientSettings
    stream_path: tuple[
        str, ...
    ] = ()  # names of the suites around the stage; each has a random stream of its own
    # Consecutive stages of one group differ only in their start, and run at the same time
    group: Hashable = None

    def runs_with(self, other: Stage) -> bool:
        """Whether both stages can share batches."""
        names = ("group", "margin_ratio_below", "gradients", "stream_path")
        return self.group is not None and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    def inside(self, suite: str) -> Stage:
        """The stage as a part of the suite of that name."""
        return dataclasses.replace(
            self, name=f"{suite}/{self.name}", stream_path=(suite, *self.stream_path)
        )


class Driver:
    """Runs stages on images: loads batches, builds gradient sources, and halves the batch when
    memory runs out.

    Args:
        model: it alone decides success.
        load: numbers of images (B,) → their batch.
        example: a few images, on which copies and precisions are tried.
        threat: the ball.
        precision: of gradients: auto, fp32 or bf16.
        slots: images attacked at a time.
        block: images in every network pass, the last ones filled up with copies, so that rounding
            does not depend on which images are attacked together; None: as many as are attacked.
        stop_at_success: finish an image as soon as it is broken; otherwise go on for the smallest
            margin.
        observe: a part of the model whose outputs come with every verdict.
    """

    def __init__(
        self,
        model: nn.Module,
        load: Callable[[Tensor], AttackBatch],
        example: AttackBatch,
        *,
        threat: Threat,
        precision: str,
        slots: int,
        block: int | None,
        stop_at_success: bool = True,
        observe: nn.Module | None = None,
    ) -> None:
        self.model, self.load, self.example, self.threat = model, load, example, threat
        self.precision, self.slots, self.block = precision, slots, block
        self.stop_at_success, self.observe = stop_at_success, observe
        self._pool = self._new_pool()
        self._networks = PreparedNetworks(precision, example.x)
        self._sources: dict[tuple[object, ...], GradientSource] = {}

    def run(
        self,
        stages: Sequence[Stage],
        state: AttackState,
        on_result: Callable[[int, SearchResult], None] = lambda number, result: None,
        candidates: Callable[[AttackState], Tensor] = lambda state: state.survived,
    ) -> None:
        """Run the stages that the state says are still to do.

        After each result the state is updated and `on_result` is called, with the number of the
        stage (0 for the clean images). `candidates` are the images that a stage may attack (N,).
        """

        def finish(number: int, result: SearchResult) -> None:
            state.update(number, result, stages[number - 1].cost if number else 1 / 3)
            on_result(number, result)

        surrogates = [stage.gradients.surrogate for stage in stages]
        with (
            device.exclusive(self.example.x.device),
            inference(self.model, self.observe, *surrogates),
        ):
            settings = stages[0].gradients if stages else GradientSettings()
            while len(rows := (state.next_stage == CLEAN).nonzero().squeeze(1)[: self.slots]):
                result = self._attempt(partial(self._classify, rows, settings))
                if result is not None:
                    finish(CLEAN, result)
            for group in _groups(stages):
                limit = next(iter(group.values())).margin_ratio_below
                if limit is not None:
                    far = candidates(state) & (state.margin_ratio >= limit)
                    for number in group:
                        state.skip(number, far)
                while (
                    self._attempt(partial(self._search, group, state, candidates, finish)) is None
                ):
                    pass
                for number in group:  # a model may have too few classes for a stage
                    state.skip(number, candidates(state))

    def _classify(self, rows: Tensor, settings: GradientSettings) -> SearchResult:
        """The verdicts on clean images."""
        source = self._source(settings)
        batch = self.load(torch.tensor(self._shape.at_most(VERDICT_BLOCK).fill(rows.tolist())))
        checks.labels(batch.y, source.classes)
        verdict, n = source.judge(batch.x, batch.y), len(rows)
        predicted, broken = verdict.predicted[:n], (verdict.predicted != batch.y)[:n]
        return SearchResult(
            rows,
            batch.x[:n],
            predicted,
            verdict.margin[:n],
            verdict.logit_margin[:n],
            broken,
            torch.ones(n),
            None if verdict.observed is None else verdict.observed[:n],
        )

    def _search(
        self,
        group: Mapping[int, Stage],
        state: AttackState,
        candidates: Callable[[AttackState], Tensor],
        finish: Callable[[int, SearchResult], None],
    ) -> bool:
        """Run stages that share their batches, on the images that the state says they are still to
        meet."""
        any_stage = next(iter(group.values()))

        def load(numbers: Tensor) -> AttackBatch:
            batch = self.load(numbers)
            return dataclasses.replace(
                batch, stream=reduce(Stream.at, any_stage.stream_path, batch.stream)
            )

        rows = (candidates(state) & (state.next_stage <= max(group))).nonzero().squeeze(1)
        if len(rows) == 0:
            return True
        source = self._source(any_stage.gradients)
        made = {
            number: stage.make_search(source, self.threat, self.stop_at_success)
            for number, stage in group.items()
        }
        searches = {number: search for number, search in made.items() if search is not None}
        if not searches:
            return True
        next_stage = dict(zip(rows.tolist(), state.next_stage[rows].tolist(), strict=True))
        order = [
            (number, image)
            for number in searches
            for image, stage in next_stage.items()
            if stage <= number
        ]
        for number, result in run_searches(
            searches,
            source.judge,
            load,
            order,
            slots=self.slots,
            shape=self._shape,
            wanted=lambda images: candidates(state)[images],
            stop_at_success=self.stop_at_success,
        ):
            finish(number, result)
        return True

    def _source(self, settings: GradientSettings) -> GradientSource:
        """The gradient source with these settings, built once."""
        key = (
            id(settings.surrogate),
            id(settings.extra),
            settings.follow,
            settings.eot,
            settings.repeats,
        )
        if key not in self._sources:
            source = GradientSource(
                self.model,
                settings,
                self.precision,
                self.example.x,
                pool=self._pool,
                networks=self._networks,
                observe=self.observe,
            )
            self._sources[key] = source.in_blocks(self.block, self._pool)
        return self._sources[key]

    def _new_pool(self) -> Any:
        """Memory that all recorded passes share; they never run at the same time."""
        return torch.cuda.graph_pool_handle() if self.example.x.is_cuda else None

    @property
    def _shape(self) -> BatchShape:
        return BatchShape() if self.block is None else BatchShape(self.block, self.block)

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if memory ran out, and then batches are half as large from now
        on."""
        try:
            return work()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error) or self.slots == 1:
                raise
        # Only here, after the error and the frames it holds are gone, can memory be freed.
        self.slots, self._pool = (self.slots + 1) // 2, self._new_pool()
        self.block = None if self.block is None else min(self.block, self.slots)
        self._sources = {
            key: source.in_blocks(self.block, self._pool) for key, source in self._sources.items()
        }
        gc.collect()  # recorded passes and their source refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def _groups(stages: Sequence[Stage]) -> list[dict[int, Stage]]:
    """The stages by number, from 1 on; consecutive ones that run at the same time are together."""
    groups: list[dict[int, Stage]] = []
    for number, stage in enumerate(stages, start=1):
        if groups and stage.runs_with(stages[number - 2]):
            groups[-1][number] = stage
        else:
            groups.append({number: stage})
    return groups


class ProgressMeter:
    """Progress in images: their number times the share of the passes that are made, of these and
    those to come.

    Broken images need no more passes. The others need those of all later stages, but not of stages
    that their margin would leave out today.
    """

    def __init__(
        self, task: progress.StageProgress, stages: Sequence[Stage], state: AttackState
    ) -> None:
        self.task, self.state, self.shown = task, state, 0
        self.limits = torch.tensor(
            sorted(
                {
                    stage.margin_ratio_below
                    for stage in stages
                    if stage.margin_ratio_below is not None
                }
            )
        )
        # Passes to come by the number of limits that the margin has reached, and by the next stage.
        self.passes_left = torch.tensor(
            [
                [
                    sum(
                        stage.cost
                        for stage in stages[max(next_stage - 1, 0) :]
                        if stage.margin_ratio_below is None
                        or int((self.limits < stage.margin_ratio_below).sum()) >= reached
                    )
                    for next_stage in range(len(stages) + 2)
                ]
                for reached in range(len(self.limits) + 1)
            ]
        )

    def show(self) -> None:
        """Update the progress bar."""
        state, survived = self.state, self.state.survived
        reached = torch.bucketize(state.margin_ratio, self.limits, right=True)
        left = float(
            torch.where(survived, self.passes_left[reached, state.next_stage], 0.0).double().sum()
        )
        made = float(state.passes.double().sum())
        done = int(len(survived) * made / (made + left) + 1e-3) if left else len(survived)
        self.task.advance(
            max(done - self.shown, 0), robust=f"{int(survived.sum())}/{len(survived)}"
        )
        self.shown = max(done, self.shown)
