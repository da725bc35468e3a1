"""What a search works on: rows of tensors, its state, its results, and the shape of its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.geometry import where_rows
from equipoise.core.rng import Stream


class Rows:
    """Base class of dataclasses of tensors (B, …), with the same first axes, that are selected and
    joined together."""

    def select(self, rows: Tensor | slice | tuple[Tensor | slice | int, ...]) -> Self:
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
        return type(self)(
            **{name: apply(getattr(self, name), getattr(other, name)) for name in names}
        )


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

        Probabilities are equal in float32 where logits are very small or very large; there the
        logits decide.
        """
        return (margin < self.margin) | (
            (margin == self.margin) & (logit_margin < self.logit_margin)
        )

    def with_nearer(
        self, point: Tensor, logit_margin: Tensor, margin: Tensor, counts: Tensor
    ) -> Self:
        """With these points (B, C, H, W) in place of `nearest` where they come nearer, of the rows
        that count (B,)."""
        nearer = self.is_nearer(logit_margin, margin) & counts
        return dataclasses.replace(
            self,
            nearest=where_rows(nearer, point, self.nearest),
            margin=torch.where(nearer, margin, self.margin),
            logit_margin=torch.where(nearer, logit_margin, self.logit_margin),
        )


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
        """The batch, detached, contiguous and on one device; an error unless images, labels and
        random streams match."""
        checks.images(self.x)
        for name, values in (("labels", self.y), ("stream", self.stream)):
            checks.require(
                len(values) == len(self.x), name, f"be those of {len(self.x)} images", len(values)
            )
        return AttackBatch(self.x.detach().contiguous(), self.y, self.stream.to(self.x.device))

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
    # (B, …) what the observed part of the model returned there, if there is one
    observed: Tensor | None = None


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
