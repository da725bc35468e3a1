"""Queries of a random search that are made ahead, in place of copies that would fill up a pass.

Few candidates of a random search are kept. After one that is not, the next query starts from the
same point and can be made ahead, in the same pass; after one that is kept, queries made ahead are
discarded. So the result is that of one query after another. A GPU does not wait for the outcome of
a pass: rows and their queries are chosen on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.attacks.search_state import SearchState


@dataclass(frozen=True, eq=False, kw_only=True)
class AgedState(SearchState):
    """Rows that know how many queries they have made."""

    age: Tensor  # (B,)


def copies_of_first(state: AgedState) -> Tensor:
    """(B,) the rows that fill up a batch: copies of the first one, whose outcome is that of the
    first.

    Images may share the number of their random stream, so that the number alone does not make a row
    a copy.
    """
    same = (state.index == state.index[0]) & (state.y == state.y[0]) & (state.age == state.age[0])
    same &= (state.x == state.x[:1]).flatten(1).all(dim=1)
    same[0] = False
    return same


@dataclass(frozen=True, eq=False)
class Schedule:
    """The queries of one pass, S in all: one of each of R rows, and more of those with most queries
    left."""

    rows: Tensor  # (R,) different rows; query s is of row s mod R
    row: Tensor  # (S,)
    ahead: Tensor  # (S,) how many queries of the same row come before it in this pass
    is_remaining: Tensor  # (S,) whether the row still has this query

    @classmethod
    def new(cls, rows: Tensor, remaining: Tensor, count: int) -> Schedule:
        """`count` queries of `rows` (R,), which still have `remaining` queries (R,) each."""
        remaining, order = remaining.sort(descending=True, stable=True)
        rows, query = rows[order], torch.arange(count, device=rows.device)
        number, ahead = query % len(rows), query // len(rows)
        return cls(rows, rows[number], ahead, ahead < remaining[number])

    def outcome(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which query of every row takes its place, the first that is kept (S,).

        Returns:
            (R,) the number of that query, whether there is one, and how many of its queries are
                finished then.
        """
        count, rows = len(self.row), len(self.rows)
        kept, is_remaining = (
            F.pad(values, (0, -count % rows)).view(-1, rows) for values in (kept, self.is_remaining)
        )
        first, is_moved = kept.long().argmax(dim=0), kept.any(dim=0)
        number = (first * rows + torch.arange(rows, device=first.device)).clamp_max(count - 1)
        return number, is_moved, torch.where(is_moved, first + 1, is_remaining.sum(dim=0))
