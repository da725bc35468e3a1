"""Slots and chunks of one search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.attacks.gradients import CLAIM_BLOCK, VERDICT_BLOCK, Verdict
from equipoise.attacks.search import chunk_length, run_searches
from equipoise.attacks.search_state import AttackBatch, BatchShape, SearchState
from equipoise.core.rng import Stream, stream


@settings(deadline=None)
@given(st.integers(1, 6000))
def test_chunks_cover_the_passes_with_little_waste(passes: int) -> None:
    chunk = chunk_length(passes)
    made = -(-passes // chunk) * chunk
    assert passes <= made < passes + chunk and made <= passes * 1.2


def test_shapes_fill_up_with_copies() -> None:
    assert BatchShape(4, 8).fill([3, 5]) == [3, 5, 3, 3, 3, 3, 3, 3]
    assert BatchShape(4, 8).fill(list(range(9))) == [*range(9), 0, 0, 0]
    assert BatchShape().fill([7]) == [7]


@dataclass
class CountingSearch:
    """Breaks image n after n passes, if there are so many; remembers the sizes of its batches."""

    passes: int = 20

    def __post_init__(self) -> None:
        self.sizes: list[int] = []

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> SearchState:
        one = x.new_ones(len(x))
        return SearchState(x=x, y=y, index=stream.index, nearest=x, margin=one, logit_margin=one)

    def advance(
        self, state: SearchState, stream: Stream, ages: Sequence[int], passes: int
    ) -> SearchState:
        self.sizes.append(len(ages))
        done = torch.tensor(ages) + passes
        return replace(state, logit_margin=torch.where(stream.index < done, -1.0, 1.0))


def _load(rows: Tensor) -> AttackBatch:
    return AttackBatch(
        torch.zeros(len(rows), 1, 1, 1),
        torch.zeros(len(rows), dtype=torch.int64),
        stream(0, "s", rows),
    )


def test_every_image_finishes_once_in_batches_of_one_size() -> None:
    search = CountingSearch()

    def judge(x: Tensor, y: Tensor, block: int) -> Verdict:
        return Verdict(torch.ones_like(y), -torch.ones(len(y)), -torch.ones(len(y)))

    results = [
        result
        for _, result in run_searches(
            {1: search},
            judge,
            _load,
            [(1, image) for image in range(11)],
            slots=4,
            shape=BatchShape(4, 4),
        )
    ]
    assert sorted(row for result in results for row in result.rows.tolist()) == list(range(11))
    assert set(search.sizes) == {4}
    assert all(bool(result.broken.all()) for result in results)


def test_claims_are_judged_in_small_passes_and_ends_in_large_ones() -> None:
    passes: list[tuple[int, int]] = []

    def judge(x: Tensor, y: Tensor, block: int) -> Verdict:
        passes.append((len(x), block))
        return Verdict(torch.ones_like(y), -torch.ones(len(y)), -torch.ones(len(y)))

    search, images = (
        CountingSearch(passes=40),
        [*range(18), *range(30, 60)],
    )  # claims after 20 passes, and at the end
    results = run_searches(
        {1: search},
        judge,
        _load,
        [(1, image) for image in images],
        slots=48,
        shape=BatchShape(256, 256),
    )
    assert {
        row: float(share)
        for _, result in results
        for row, share in zip(result.rows.tolist(), result.share, strict=True)
    } == {image: 0.5 if image < 20 else 1 for image in images}
    assert passes == [(32, CLAIM_BLOCK), (128, VERDICT_BLOCK)]


def test_results_belong_to_their_images_where_claims_and_ends_meet() -> None:
    """Image n claims to be broken after n passes; that is true of odd ones, and margins tell which
    image was judged."""

    def load(rows: Tensor) -> AttackBatch:
        batch = _load(rows)
        return replace(batch, x=rows.view(-1, 1, 1, 1).float())

    def judge(x: Tensor, y: Tensor, block: int) -> Verdict:
        return Verdict(x.flatten().long() % 2, x.flatten(), x.flatten())

    images = [
        51,
        5,
        60,
        7,
        8,
        70,
        3,
        12,
        81,
        9,
        10,
        62,
        13,
        14,
    ]  # fewer slots than images: ages differ
    results = [
        result
        for _, result in run_searches(
            {1: CountingSearch(passes=40)},
            judge,
            load,
            [(1, image) for image in images],
            slots=3,
            shape=BatchShape(4, 4),
        )
    ]
    seen = [
        row
        for result in results
        for row in zip(
            result.rows.tolist(),
            result.margin.tolist(),
            result.images.flatten().tolist(),
            result.broken.tolist(),
            result.share.tolist(),
            strict=True,
        )
    ]
    assert sorted(seen) == sorted(
        (image, image, image, image % 2 == 1, 0.5 if image < 20 and image % 2 else 1.0)
        for image in images
    )


def test_a_claim_that_is_not_confirmed_is_no_success() -> None:
    def judge(x: Tensor, y: Tensor, block: int) -> Verdict:
        return Verdict(torch.zeros_like(y), torch.full((len(y),), 0.5), torch.full((len(y),), 2.0))

    results = [
        result
        for _, result in run_searches(
            {1: CountingSearch()},
            judge,
            _load,
            [(1, image) for image in range(3)],
            slots=3,
            shape=BatchShape(),
        )
    ]
    assert [result.broken.tolist() for result in results] == [[False] * 3]
    assert results[0].margin.tolist() == [0.5] * 3 and results[0].logit_margin.tolist() == [2.0] * 3
    assert results[0].share.tolist() == [1.0] * 3
