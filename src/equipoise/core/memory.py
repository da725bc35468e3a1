"""Work in batches that are halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.core import checks

T = TypeVar("T")


def in_batches(
    work: Callable[[slice], T], count: int, batch_size: int
) -> Iterator[tuple[slice, T]]:
    """Call `work` on consecutive slices of 0 … count − 1 and yield each slice with its result.

    Random streams are keyed by image (:mod:`equipoise.core.rng`), so a smaller batch changes speed
    and rounding only.
    """
    checks.whole("batch_size", batch_size, least=1)
    start = 0
    while start < count:
        rows = slice(start, min(start + batch_size, count))
        try:
            result = work(rows)
        except RuntimeError as error:
            if not is_out_of_memory(error) or rows.stop - start == 1:
                raise
        else:
            yield rows, result
            start = rows.stop
            continue
        # Only here, after the error and the frames it holds are gone, can memory be freed.
        batch_size = (rows.stop - start + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def in_blocks(
    function: Callable[[Tensor], Tensor], rows: Tensor, batch_size: int, block: int | None
) -> Tensor:
    """`function` of row numbers (B,) on batches, or on blocks of one size, the last filled up with
    copies of the first.

    Rounding then does not depend on how many rows there are, and cuDNN, which plans its
    convolutions anew for every batch size that it has not seen, plans them once. Only where memory
    runs out are blocks smaller.
    """

    def work(part: slice) -> Tensor:
        own = rows[part]
        return function(torch.cat([own, rows[:1].expand(part.stop - part.start - len(own))]))

    size = block or 1
    parts = in_batches(work, -(-len(rows) // size) * size, block or batch_size)
    return torch.cat([part for _, part in parts])[: len(rows)]


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an exception of its own; the CPU allocator only has a message."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
