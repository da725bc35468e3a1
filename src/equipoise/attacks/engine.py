"""Many searches side by side: one slot per image, refilled as images finish.

A search is a state machine over rows. Every row is an image at its own age (passes made so far) and never
looks at its neighbours, so rows can be dropped when their image is broken, and their slots given to images
that wait: batches stay full across the whole data set.

**The same rows, always.** What a row computes must not depend on its company, or a resumed or sharded run
would answer differently. Chance follows the image (:mod:`equipoise.core.rng`). Rounding follows the shape of the
batch: matrix products and convolutions of other shapes sum in another order, on the CPU (measured: from one
image up, at sizes that depend on layer and threads) as on CUDA. So every pass of a network sees a fixed number
of rows, the last ones filled up with copies: the whole batch on CUDA, and blocks of 8 on the CPU. Only a network
that was measured to be indifferent to its company (:mod:`equipoise.attacks.batch_invariance`) sees batches of any size
from 8 up. Rows enter and leave only at the end of a leg, a fixed number of passes, so that also the moments of
verification depend on the age of a row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from equipoise.attacks.gradients import GradientSource
from equipoise.core.rng import Stream

State = dict[str, Tensor]  # every entry (B, …); `x`, `y`, `nearest`, `margin` are always there


class Search(Protocol):
    """What one algorithm does to a batch of rows."""

    passes: int  # how long a row lives

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        """The state at age 0; `margin` is that of `nearest`, or inf where it is not known."""

    def leg(self, state: State, chance: Stream, ages: Sequence[int], passes: int) -> None:
        """Make `passes` passes in place; `ages` are those of the rows before them."""


@dataclass(frozen=True)
class AttackBatch:
    """Images to attack, with their chance."""

    x: Tensor
    y: Tensor
    chance: Stream


@dataclass(frozen=True)
class SearchResult:
    """What a search found for some jobs, judged by the model itself."""

    jobs: Tensor  # (B,) on the CPU
    nearest: Tensor  # (B, C, H, W)
    predicted: Tensor  # (B,)
    margin: Tensor  # (B,)
    fooled: Tensor  # (B,)


@dataclass(frozen=True)
class BatchShape:
    """Batches have a multiple of `multiple` rows, and at least `least`."""

    multiple: int = 1
    least: int = 1

    def filled(self, rows: list[int]) -> list[int]:
        """Rows, and copies of the first up to such a number."""
        count = max(len(rows), self.least)
        return rows + [rows[0]] * (count + -count % self.multiple - len(rows))


def leg_length(passes: int) -> int:
    """Some 8 to 20 passes, or about a hundred of thousands, so that as few as possible go beyond the end."""
    if passes <= 20:
        return passes
    legs = range(80, 121) if passes > 400 else range(8, 21)
    return min(legs, key=lambda leg: (-passes % leg, -leg))


def hunt(
    search: Search,
    adversary: GradientSource,
    fetch: Callable[[Tensor], AttackBatch],
    jobs: Tensor,
    *,
    slots: int,
    grain: BatchShape = BatchShape(),  # noqa: B008
) -> Iterator[SearchResult]:
    """Search for every job, `slots` at a time; yields the jobs that finish, in no fixed order.

    Args:
        search: the algorithm.
        adversary: judges.
        fetch: job numbers → their images.
        jobs: (N,) numbers, on the CPU.
        slots: rows in work at a time.
        grain: to which sizes batches are filled up.
    """
    leg = leg_length(search.passes)
    state: State = {}
    live: list[int] = []  # job of every row but the filling
    ages: list[int] = []
    waiting = jobs.tolist()
    while live or waiting:
        if waiting and len(live) < slots:
            new, waiting = waiting[: slots - len(live)], waiting[slots - len(live) :]
            batch = fetch(torch.tensor(grain.filled(new)))
            fresh = {**search.start(batch.x, batch.y, batch.chance), "index": batch.chance.index}
            key = batch.chance.key
            state = fresh if not live else {name: torch.cat([state[name][: len(live)], value[: len(new)]])
                                            for name, value in fresh.items()}
            live, ages = live + new, ages + [0] * len(new)
        rows = grain.filled(list(range(len(live))))
        if rows != list(range(len(state["y"]))):
            state = _take(state, rows)
        search.leg(state, Stream(key, state["index"]), [ages[row] for row in rows], leg)
        ages = [age + leg for age in ages]
        found, keep = _verified(search, adversary, state, live, ages, grain)
        if found is not None:
            yield found
        if len(keep) < len(live):
            live, ages = [live[row] for row in keep], [ages[row] for row in keep]
            if live:
                state = _take(state, keep)


def _verified(
    search: Search, adversary: GradientSource, state: State, live: list[int], ages: list[int], grain: BatchShape
) -> tuple[SearchResult | None, list[int]]:
    """Judge every claim, and whatever is at its end; broken rows and old rows are done."""
    claims = ((state["margin"][: len(live)] <= 0) & (not adversary.persist)).tolist()
    asked = [row for row in range(len(live)) if claims[row] or ages[row] >= search.passes]
    if not asked:
        return None, list(range(len(live)))
    filled = torch.tensor(grain.filled(asked), device=state["y"].device)
    x, y = state["nearest"][filled], state["y"][filled]
    verdict = adversary.judge(x, y)
    count = len(asked)
    truth, fooled = verdict.margin[:count], verdict.wrong(y)[:count]
    # A claim that the model does not confirm is no claim: the next iterate below the truth takes its place. At a
    # tie the model may still say y; a margin just above zero keeps such a row searching.
    above = truth.clamp_min(torch.finfo(truth.dtype).tiny)
    state["margin"][filled[:count]] = torch.where(fooled, truth, above).to(state["margin"].dtype)
    done = [i for i, (row, broken) in enumerate(zip(asked, fooled.tolist(), strict=True))
            if broken or ages[row] >= search.passes]
    if not done:
        return None, list(range(len(live)))
    over = {asked[i] for i in done}
    picked = torch.tensor(done, device=x.device)
    found = SearchResult(torch.tensor([live[asked[i]] for i in done]), x[picked], verdict.predicted[picked],
                  truth[picked], fooled[picked])
    return found, [row for row in range(len(live)) if row not in over]


def _take(state: State, rows: list[int]) -> State:
    index = torch.tensor(rows, device=state["y"].device)
    return {name: value[index] for name, value in state.items()}


def step_towards(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows where it is better."""
    return torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
