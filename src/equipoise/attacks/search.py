"""Run one search on many images: one slot per image, refilled as images finish.

A search is a state machine over rows. Every row is one image at its own age (passes made so far) and never depends on
other rows, so rows are dropped when their image is broken, and their slots go to images that wait: batches stay full
across the whole data set.

**Results do not depend on the other images of a batch**, or a resumed or sharded run would give other rows. Random
numbers are keyed by image (:mod:`equipoise.core.rng`). Rounding depends on the shape of a batch: matrix products and
convolutions of other shapes sum in another order, on the CPU (measured: from one image up, at sizes that depend on
layer and threads) as on CUDA. So every network pass has a fixed number of rows (:class:`BatchShape`), the last ones
filled up with copies. Rows enter and leave only after a chunk, a fixed number of passes, so that also the times of
verification depend on the age of a row alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from equipoise.attacks.gradients import Verdict
from equipoise.core import checks
from equipoise.core.geometry import where_rows
from equipoise.core.rng import Stream


class Rows:
    """Base class of dataclasses of tensors (B, …) whose rows are selected and joined together."""

    def select(self, rows: Tensor | slice) -> Self:
        """The given rows."""
        return self._map(lambda value, _: value[rows], self)

    def join(self, other: Self) -> Self:
        """These rows followed by those of `other`."""
        return self._map(lambda mine, theirs: torch.cat([mine, theirs]), other)

    def _map(self, function: Callable[[Tensor, Tensor], Tensor], other: Self) -> Self:
        def apply(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, Rows):
                return mine._map(function, theirs)
            return function(mine, theirs) if isinstance(mine, Tensor) else mine

        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(**{name: apply(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchState(Rows):
    """What every search knows about its rows; algorithms add fields."""

    x: Tensor  # (B, C, H, W) clean images
    y: Tensor  # (B,) labels
    index: Tensor  # (B,) which image each row is, for its random numbers
    nearest: Tensor  # (B, C, H, W) the point with the smallest margin so far
    margin: Tensor  # (B,) probability margin of `nearest`, inf where unknown
    logit_margin: Tensor  # (B,) logit margin of `nearest`, inf where unknown: its sign says whether the model is fooled

    def is_nearer(self, logit_margin: Tensor, margin: Tensor) -> Tensor:
        """(B,) whether points with these margins come nearer than `nearest`.

        Probabilities are equal in float32 where logits are very small or very large; there the logits decide.
        """
        return (margin < self.margin) | ((margin == self.margin) & (logit_margin < self.logit_margin))

    def with_nearer(self, point: Tensor, logit_margin: Tensor, margin: Tensor, counts: Tensor) -> Self:
        """With these points (B, C, H, W) in place of `nearest` where they come nearer, of the rows that count (B,)."""
        nearer = self.is_nearer(logit_margin, margin) & counts
        return dataclasses.replace(
            self, nearest=where_rows(nearer, point, self.nearest), margin=torch.where(nearer, margin, self.margin),
            logit_margin=torch.where(nearer, logit_margin, self.logit_margin))


State = TypeVar("State", bound=SearchState)


class Search(Protocol[State]):
    """One algorithm on a batch of rows."""

    passes: int  # after so many a row is finished

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> State:
        """The state at age 0."""

    def advance(self, state: State, stream: Stream, ages: Sequence[int], passes: int) -> State:
        """The state after `passes` more passes; `ages` are those of the rows before them."""


@dataclass(frozen=True)
class AttackBatch:
    """Images (B, C, H, W) to attack, with labels (B,) and random streams."""

    x: Tensor
    y: Tensor
    stream: Stream

    def checked(self) -> AttackBatch:
        """The batch, detached and on one device; an error unless images, labels and random streams match."""
        checks.images(self.x)
        for name, values in (("labels", self.y), ("stream", self.stream)):
            checks.require(len(values) == len(self.x), name, f"be those of {len(self.x)} images", len(values))
        return AttackBatch(self.x.detach(), self.y, self.stream.to(self.x.device))

    def select(self, rows: Tensor) -> AttackBatch:
        """The given rows."""
        rows = rows.to(self.x.device)
        return AttackBatch(self.x[rows], self.y[rows], self.stream[rows])


@dataclass(frozen=True)
class SearchResult(Rows):
    """The outcome of a search for some images, judged by the model itself in full precision."""

    rows: Tensor  # (B,) numbers of the images, on the CPU
    images: Tensor  # (B, C, H, W) what breaks the image, or else comes nearest to it
    predicted: Tensor  # (B,) classes there
    margin: Tensor  # (B,) signed probability margins there
    logit_margin: Tensor  # (B,) signed logit margins there
    broken: Tensor  # (B,) whether another class wins
    share: Tensor  # (B,) of the passes of the search that were made, on the CPU


@dataclass(frozen=True)
class BatchShape:
    """Batches have a multiple of `multiple` rows, and at least `least`."""

    multiple: int = 1
    least: int = 1

    def fill(self, rows: list[int]) -> list[int]:
        """The rows, and copies of the first up to such a number."""
        count = max(len(rows), self.least)
        return rows + [rows[0]] * (count + -count % self.multiple - len(rows))

    def at_most(self, block: int) -> BatchShape:
        """The shape of smaller batches, for passes in blocks of at most so many rows."""
        return BatchShape(min(self.multiple, block), min(self.least, block))


def chunk_length(passes: int) -> int:
    """Passes between two verifications: 8 to 20, or about a hundred of thousands, with few beyond the last pass."""
    if passes <= 20:
        return passes
    lengths = range(80, 121) if passes > 400 else range(8, 21)
    return min(lengths, key=lambda length: (-passes % length, -length))


class _InOrder:
    """Finished results by (stage, image), handed out so that those of an image come in the order of its stages."""

    def __init__(self, order: Sequence[tuple[int, int]]) -> None:
        self.pending: dict[int, list[int]] = {}  # by image: its stages without a result that was handed out
        for stage, image in order:
            self.pending.setdefault(image, []).append(stage)
        self.finished: dict[tuple[int, int], tuple[SearchResult, int]] = {}  # with the row of the result
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
        """The results of one stage on images that have those of all earlier stages; None if there are none."""
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
        return first, reduce(Rows.join, [result.select(torch.tensor(own)) for result, own in rows.values()])

    def drop(self, image: int) -> None:
        """The other stages of this image are not needed."""
        for stage in self.pending.pop(image, []):
            self.finished.pop((stage, image), None)
        self._update_ready(image)


def run_searches(
    searches: Mapping[int, Search[State]], judge: Callable[[Tensor, Tensor], Verdict],
    load: Callable[[Tensor], AttackBatch], order: Sequence[tuple[int, int]], *, slots: int, shape: BatchShape,
    verdict_shape: BatchShape, wanted: Callable[[Tensor], Tensor] = torch.ones_like, stop_at_success: bool = True,
) -> Iterator[tuple[int, SearchResult]]:
    """Search for every image, `slots` rows at a time; yields stages with results as images finish.

    Stages that differ only in their start, such as target classes, share the slots: batches stay full where few images
    are left. The outcome is that of one stage after another: an image gets results in this order while it is wanted.

    Args:
        searches: by the number of their stage.
        judge: images and labels → the verdict of the model itself.
        load: numbers of images → their batch.
        order: (stage, image), in the order in which rows get slots.
        slots: rows searched at a time.
        shape, verdict_shape: sizes to which batches are filled up, and those of starts and verdicts.
        wanted: numbers of images → whether they still need their other stages, given the results so far.
        stop_at_success: finish a row as soon as it breaks its image; otherwise search on for a smaller margin.
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
            fresh, key = _start(searches, load, new, verdict_shape)
            state = fresh if state is None or not live else state.select(slice(len(live))).join(fresh)
            live, ages = live + new, ages + [0] * len(new)
        if state is None or not live:
            return
        filled = shape.fill(list(range(len(live))))
        if filled != list(range(len(state.y))):
            state = state.select(torch.tensor(filled, device=state.y.device))
        state = first.advance(state, Stream(key, state.index), [ages[row] for row in filled], chunk)
        ages = [age + chunk for age in ages]
        claims = ((state.logit_margin[: len(live)] <= 0) & stop_at_success).tolist()
        candidates = [row for row, age in enumerate(ages) if claims[row] or age >= passes]
        if not candidates:
            continue
        share = torch.tensor([min(ages[row] / passes, 1) for row in candidates])
        state, result = _verify(state, candidates, [image for _, image in live], share, judge, verdict_shape)
        done = [number for number, (row, broken) in enumerate(zip(candidates, result.broken.tolist(), strict=True))
                if broken or ages[row] >= passes]
        if not done:
            continue
        finished = {candidates[number] for number in done}
        results.add([live[candidates[number]][0] for number in done], result.select(torch.tensor(done)))
        while (ready := results.pop()) is not None:
            yield ready
            images = ready[1].rows
            for image in images[~wanted(images).bool()].tolist():
                results.drop(image)
        keep = [row for row, (_, image) in enumerate(live) if row not in finished and image in results.pending]
        live, ages = [live[row] for row in keep], [ages[row] for row in keep]
        if live:
            state = state.select(torch.tensor(keep, device=state.y.device))


def _take(waiting: deque[tuple[int, int]], count: int, wanted: Container[int]) -> list[tuple[int, int]]:
    """Up to `count` (stage, image) of those that wait, without images that are not wanted; by stage."""
    taken: list[tuple[int, int]] = []
    while waiting and len(taken) < count:
        stage, image = waiting.popleft()
        if image in wanted:
            taken.append((stage, image))
    return sorted(taken, key=lambda pair: pair[0])


def _start(searches: Mapping[int, Search[State]], load: Callable[[Tensor], AttackBatch], new: Sequence[tuple[int, int]],
           shape: BatchShape) -> tuple[State, int]:
    """The state of new rows, which are sorted by stage, and the key of their random streams."""
    parts, key = [], 0
    for stage, pairs in groupby(new, key=lambda pair: pair[0]):
        images = [image for _, image in pairs]
        batch = load(torch.tensor(shape.fill(images)))
        key = batch.stream.key
        parts.append(searches[stage].start(batch.x, batch.y, batch.stream).select(slice(len(images))))
    return reduce(Rows.join, parts), key


def _verify(state: State, candidates: list[int], live: list[int], share: Tensor,
            judge: Callable[[Tensor, Tensor], Verdict], shape: BatchShape) -> tuple[State, SearchResult]:
    """Judge rows that claim success or are finished; the state gets their true margins."""
    filled = torch.tensor(shape.fill(candidates), device=state.y.device)
    x, y, count = state.nearest[filled], state.y[filled], len(candidates)
    verdict = judge(x, y)
    result = SearchResult(torch.tensor([live[row] for row in candidates]), x[:count], verdict.predicted[:count],
                          verdict.margin[:count], verdict.logit_margin[:count], (verdict.predicted != y)[:count],
                          share)
    # A claim that the model does not confirm is dropped: the next iterate below the true margin takes its place. At a
    # tie the model may still predict y; a margin just above zero keeps such a row searching.
    above = result.logit_margin.clamp_min(torch.finfo(result.logit_margin.dtype).tiny)
    margin, logit_margin = state.margin.clone(), state.logit_margin.clone()
    margin[filled[:count]] = result.margin.to(margin.dtype)
    logit_margin[filled[:count]] = torch.where(result.broken, result.logit_margin, above).to(margin.dtype)
    return dataclasses.replace(state, margin=margin, logit_margin=logit_margin), result
