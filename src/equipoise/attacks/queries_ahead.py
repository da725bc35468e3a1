"""Queries of a random search that are made ahead: which rows of a batch need none, and which the next pass has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equipoise.attacks.search_state import SearchState


def copies_of_first(state: SearchState, ages: Sequence[int]) -> set[int]:
    """The rows that fill up a batch: copies of the first one, whose outcome is that of the first.

    Images may share the number of their random stream, so that the number alone does not make a row a copy.
    """
    same = (state.index == state.index[0]) & (state.y == state.y[0])
    return {row for row in same.nonzero().flatten().tolist()
            if row > 0 and ages[row] == ages[0] and bool((state.x[row] == state.x[0]).all())}


def schedule(remaining: Mapping[int, range], block: int) -> list[tuple[int, int]]:
    """(row, query) of the next pass: one query of every row, and more of those with most left up to a full block."""
    order = sorted(remaining, key=lambda row: -len(remaining[row]))
    each, more = divmod(-len(order) % block, len(order))
    return [(row, query) for number, row in enumerate(order)
            for query in remaining[row][: 1 + each + (number < more)]]
