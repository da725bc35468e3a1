from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import memory


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 60))
def test_every_row_once_however_little_fits(count: int, batch_size: int, fits: int) -> None:
    def work(rows: slice) -> list[int]:
        if rows.stop - rows.start > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(range(rows.start, rows.stop))

    found = [i for _, part in memory.in_batches(work, count, batch_size) for i in part]
    assert found == list(range(count))


def test_one_image_that_does_not_fit_is_an_error() -> None:
    def work(rows: slice) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        )

    with pytest.raises(RuntimeError, match="can't allocate"):
        list(memory.in_batches(work, 4, 4))


def test_other_errors_pass_through() -> None:
    calls = []

    def work(rows: slice) -> None:
        calls.append(rows)
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        list(memory.in_batches(work, 4, 4))
    assert calls == [slice(0, 4)]


def test_memory_of_the_failed_batch_is_free_before_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large: list[weakref.ref[torch.Tensor]] = []
    freed = []

    def work(rows: slice) -> int:
        images = torch.zeros(rows.stop - rows.start)
        large.append(weakref.ref(images))
        if len(images) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(images)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(large[-1]() is None))
    assert [count for _, count in memory.in_batches(work, 8, 8)] == [2, 2, 2, 2] and freed == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("count", "block", "at_most", "sizes"),
    [
        (10, None, 99, [6, 4]),
        (10, 4, 99, [4, 4, 4]),
        (8, 4, 99, [4, 4]),
        (3, 4, 99, [4]),
        (5, 4, 2, [2, 2, 2, 2]),
    ],
)
def test_blocks_have_one_size(
    count: int, block: int | None, at_most: int, sizes: list[int]
) -> None:
    seen = list[int]()

    def function(part: torch.Tensor) -> torch.Tensor:
        if len(part) > at_most:
            raise RuntimeError("can't allocate memory")
        seen.append(len(part))
        return 2 * part

    rows = torch.arange(count) + 7
    assert torch.equal(memory.in_blocks(function, rows, 6, block), 2 * rows)
    assert seen == sizes
