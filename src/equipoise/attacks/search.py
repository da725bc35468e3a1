"""Run one search on many images: one slot per image, refilled as images finish.

A search is a state machine over rows. Every row is one image at its own age (passes made so far)
and never depends on other rows, so rows are dropped when their image is broken, and their slots go
to images that wait: batches stay full across the whole data set.

**Results do not depend on the other images of a batch**, or a resumed or sharded run would give
other rows. Random numbers are keyed by image (:mod:`equipoise.core.rng`). Rounding depends on the
shape of a batch, because products and convolutions of other shapes sum in another order. So every
network pass has a fixed number of rows (:class:`BatchShape`), the last ones filled up with copies.
Rows enter and leave only after a chunk, a fixed number of passes, so that also the times of
verification depend on the age of a row alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from equipoise.attacks.gradients import CLAIM_BLOCK, VERDICT_BLOCK, Verdict
from equipoise.attacks.search_state import (
    AttackBatch,
    BatchShape,
    Rows,
    Search,
    SearchResult,
    State,
)
from equipoise.core.rng import Stream


def chunk_length(passes: int) -> int:
    """Passes between two verifications: 8 to 20, or about a hundred of thousands, with few beyond
    the last pass."""
    if passes <= 20:
        return passes
    lengths = range(80, 121) if passes > 400 else range(8, 21)
    return min(lengths, key=lambda length: (-passes % length, -length))


class _InOrder:
    """Finished results by (stage, image), handed out so that those of an image come in the order of
    its stages."""

    def __init__(self, order: Sequence[tuple[int, int]]) -> None:
        self.pending: dict[
            int, list[int]
        ] = {}  # by image: its stages without a result that was handed out
        for stage, image in order:
            self.pending.setdefault(image, []).append(stage)
        self.finished: dict[
            tuple[int, int], tuple[SearchResult, int]
        ] = {}  # with the row of the result
        self.ready: set[int] = set()  # images whose next stage is finished

    def add(self, stages: Sequence[int], result: SearchResult) -> None:
        for row, (stage, image) in enumerate(zip(stages, result.rows.tolist(), strict=True)):
            self.finished[stage, image] = (result, row)
            self._update_ready(image)

    def _update_ready(self, image: int) -> None:
        stages = self.pending.get(image)
        if stages and (stages[0], image) in self.finished:
            self.ready.add(image)
        else:
            self.ready.discard(image)

    def pop(self) -> tuple[int, SearchResult] | None:
        """The results of one stage on images that have those of all earlier stages; None if there
        are none."""
        ready = [(self.pending[image][0], image) for image in sorted(self.ready)]
        if not ready:
            return None
        first = min(stage for stage, _ in ready)
        rows: dict[int, tuple[SearchResult, list[int]]] = {}  # by the result they belong to
        for stage, image in ready:
            if stage == first:
                result, row = self.finished.pop((stage, image))
                del self.pending[image][0]
                if not self.pending[image]:
                    del self.pending[image]
                self._update_ready(image)
                rows.setdefault(id(result), (result, []))[1].append(row)
        return first, reduce(
            Rows.join, [result.select(torch.tensor(own)) for result, own in rows.values()]
        )

    def drop(self, image: int) -> None:
        """The other stages of this image are not needed."""
        for stage in self.pending.pop(image, []):
            self.finished.pop((stage, image), None)
        self._update_ready(image)


def run_searches(
    searches: Mapping[int, Search[State]],
    judge: Callable[[Tensor, Tensor, int], Verdict],
    load: Callable[[Tensor], AttackBatch],
    order: Sequence[tuple[int, int]],
    *,
    slots: int,
    shape: BatchShape,
    wanted: Callable[[Tensor], Tensor] = torch.ones_like,
    stop_at_success: bool = True,
) -> Iterator[tuple[int, SearchResult]]:
    """Search for every image, `slots` rows at a time; yields stages with results as images finish.

    Stages that differ only in their start, such as target classes, share the slots: batches stay
    full where few images are left. The outcome is that of one stage after another: an image gets
    results in this order while it is wanted.

    Args:
        searches: by the number of their stage.
        judge: images, labels and the images per pass → the verdict of the model itself.
        load: numbers of images → their batch.
        order: (stage, image), in the order in which rows get slots.
        slots: rows searched at a time.
        shape: sizes to which batches are filled up.
        wanted: numbers of images → whether they still need their other stages, given the results so
            far.
        stop_at_success: finish a row as soon as it breaks its image; otherwise search on for a
            smaller margin.
    """
    first = next(iter(searches.values()))
    chunk, passes = chunk_length(first.passes), first.passes
    live: list[tuple[int, int]] = []  # stage and image of every row but the filling
    ages: list[int] = []
    waiting, results = deque(order), _InOrder(order)
    state: State | None = None
    key = 0  # of the random streams, the same for all images
    while True:
        if new := _take(waiting, slots - len(live), results.pending):
            fresh, key = _start(searches, load, new, shape.at_most(VERDICT_BLOCK))
            state = (
                fresh if state is None or not live else state.select(slice(len(live))).join(fresh)
            )
            live, ages = live + new, ages + [0] * len(new)
        if state is None or not live:
            return
        filled = shape.fill(list(range(len(live))))
        if filled != list(range(len(state.y))):
            state = state.select(torch.tensor(filled, device=state.y.device))
        state = first.advance(state, Stream(key, state.index), [ages[row] for row in filled], chunk)
        ages = [age + chunk for age in ages]
        claims = ((state.logit_margin[: len(live)] <= 0) & stop_at_success).tolist()
        due = (
            (VERDICT_BLOCK, [row for row, age in enumerate(ages) if age >= passes]),
            (CLAIM_BLOCK, [row for row, age in enumerate(ages) if claims[row] and age < passes]),
        )
        candidates = [row for _, rows in due for row in rows]
        if not candidates:
            continue
        result = reduce(
            Rows.join,
            [
                _judge(state, rows, live, ages, judge, block, shape, passes)
                for block, rows in due
                if rows
            ],
        )
        state = _with_true_margins(state, candidates, result)
        done = [
            number
            for number, (row, broken) in enumerate(
                zip(candidates, result.broken.tolist(), strict=True)
            )
            if broken or ages[row] >= passes
        ]
        if not done:
            continue
        finished = {candidates[number] for number in done}
        results.add(
            [live[candidates[number]][0] for number in done], result.select(torch.tensor(done))
        )
        while (ready := results.pop()) is not None:
            yield ready
            images = ready[1].rows
            for image in images[~wanted(images).bool()].tolist():
                results.drop(image)
        keep = [
            row
            for row, (_, image) in enumerate(live)
            if row not in finished and image in results.pending
        ]
        live, ages = [live[row] for row in keep], [ages[row] for row in keep]
        if live:
            state = state.select(torch.tensor(keep, device=state.y.device))


def _take(
    waiting: deque[tuple[int, int]], count: int, wanted: Container[int]
) -> list[tuple[int, int]]:
    """Up to `count` (stage, image) of those that wait, without images that are not wanted; by
    stage."""
    taken: list[tuple[int, int]] = []
    while waiting and len(taken) < count:
        stage, image = waiting.popleft()
        if image in wanted:
            taken.append((stage, image))
    return sorted(taken, key=lambda pair: pair[0])


def _start(
    searches: Mapping[int, Search[State]],
    load: Callable[[Tensor], AttackBatch],
    new: Sequence[tuple[int, int]],
    shape: BatchShape,
) -> tuple[State, int]:
    """The state of new rows, which are sorted by stage, and the key of their random streams."""
    parts, key = [], 0
    for stage, pairs in groupby(new, key=lambda pair: pair[0]):
        images = [image for _, image in pairs]
        batch = load(torch.tensor(shape.fill(images)))
        key = batch.stream.key
        parts.append(
            searches[stage].start(batch.x, batch.y, batch.stream).select(slice(len(images)))
        )
    return reduce(Rows.join, parts), key


def _judge(
    state: State,
    rows: list[int],
    live: Sequence[tuple[int, int]],
    ages: Sequence[int],
    judge: Callable[[Tensor, Tensor, int], Verdict],
    block: int,
    shape: BatchShape,
    passes: int,
) -> SearchResult:
    """The verdicts on some rows, `block` of them in a pass.

    Which block a row belongs to depends on its age alone, or other rows would change its rounding
    errors.
    """
    filled = torch.tensor(shape.at_most(block).fill(rows), device=state.y.device)
    x, y, count = state.nearest[filled], state.y[filled], len(rows)
    verdict = judge(x, y, block)
    return SearchResult(
        torch.tensor([live[row][1] for row in rows]),
        x[:count],
        verdict.predicted[:count],
        verdict.margin[:count],
        verdict.logit_margin[:count],
        (verdict.predicted != y)[:count],
        torch.tensor([min(ages[row] / passes, 1) for row in rows]),
        None if verdict.observed is None else verdict.observed[:count],
    )


def _with_true_margins(state: State, rows: list[int], result: SearchResult) -> State:
    """The state after rows that claimed success or ended were judged."""
    # A claim that the model does not confirm is dropped: the next iterate below the true margin
    # takes its place. At a tie the model may still predict y; a margin just above zero keeps such a
    # row searching.
    above = result.logit_margin.clamp_min(torch.finfo(result.logit_margin.dtype).tiny)
    index = torch.tensor(rows, device=state.y.device)
    margin, logit_margin = state.margin.clone(), state.logit_margin.clone()
    margin[index] = result.margin.to(margin.dtype)
    logit_margin[index] = torch.where(result.broken, result.logit_margin, above).to(margin.dtype)
    return dataclasses.replace(state, margin=margin, logit_margin=logit_margin)
