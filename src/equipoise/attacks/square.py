"""Square attack [Andriushchenko2020]: random search with square patches, no gradients.

A random patch of new colours is kept whenever it lowers the margin between y and the best other
class. The norms propose differently: ℓ∞ squares of ±eps per channel, ℓ2 bumps that take their mass
from another window, and ℓ1 the same with steeper bumps, projected onto the intersection of ball and
[0, 1] [Croce2021].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.search_state import SearchState
from equipoise.attacks.square_patches import (
    BumpPatches,
    SquarePatches,
    Window,
    make_bumps,
    signs_of,
)
from equipoise.attacks.suite import Attack
from equipoise.core import checks, geometry
from equipoise.core.geometry import where_rows
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

# The share of pixels in a patch is halved after each of these numbers of queries.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
CHECK_EVERY = 10  # queries, after which it is asked whether any row still needs another


@dataclass(frozen=True)
class Square(Attack):
    """Random search with square patches; surrogate and extra term are not used.

    Args:
        queries: forward passes per image and start.
        share: of the pixels in the first patches; it shrinks with the queries.
        restarts: starts per image; images already broken are left out of later ones.
    """

    name: ClassVar[str] = "square"
    queries: int = 5000
    share: float = 0.8
    restarts: int = 1

    def __post_init__(self) -> None:
        checks.whole("queries", self.queries, least=1, most=checks.MAX_STEPS)
        checks.within("share", self.share, 0, 1)
        checks.whole("restarts", self.restarts, least=1, most=1000)

    def stages(self) -> tuple[Stage, ...]:
        """One per start, such as square, square-2@100 and square-0.5."""
        suffix = "" if self.queries == 5000 else f"@{self.queries}"
        suffix += "" if self.share == 0.8 else f"-{self.share:g}"
        names = [
            f"square{f'-{restart + 1}' if restart else ''}{suffix}"
            for restart in range(self.restarts)
        ]
        return tuple(
            self.stage(name, partial(self._search, restart), self.queries / 3)
            for restart, name in enumerate(names)
        )

    def _search(
        self, restart: int, source: GradientSource, threat: Threat, stop_at_success: bool
    ) -> _SquareSearch[Any]:
        return SEARCHES[threat.norm](source, threat, self, restart, stop_at_success)


@dataclass(frozen=True, eq=False, kw_only=True)
class _SquareState(SearchState):
    low: Tensor | None  # (B, C, H, W) bounds of an ℓ∞ ball
    high: Tensor | None


Patches = TypeVar("Patches", SquarePatches, BumpPatches)


class _SquareSearch(ABC, Generic[Patches]):
    """What all norms share: a candidate is kept if its margin is smaller.

    The margin of logits, as in the paper; where the smallest margin of all is searched, that of
    probabilities.
    """

    words: int  # random words per query, besides a sign for every channel

    def __init__(
        self,
        source: GradientSource,
        threat: Threat,
        attack: Square,
        restart: int,
        stop_at_success: bool,
    ) -> None:
        self.threat, self.restart, self.stop_at_success = threat, restart, stop_at_success
        self.passes = attack.queries + 1  # the start is queried too
        self.margins, self.example = source.margins(), source.example
        height, width = self.example.shape[2:]
        pixels = [
            attack.share * height * width / 2**halvings for halvings in range(len(HALVINGS) + 1)
        ]
        sides = [min(self.round_side(round(math.sqrt(count))), height, width) for count in pixels]
        # Edge of a patch by the number of halvings
        self.sides = torch.tensor(sides, device=self.example.device)
        self.halvings = torch.tensor(HALVINGS, device=self.example.device)

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> _SquareState:
        unknown = x.new_full((len(x),), torch.inf)
        low, high = geometry.reusable_bounds(x, self.threat)
        pattern = geometry.project(
            self.pattern(x, stream.at("square", self.restart)), x, self.threat
        )
        return _SquareState(
            x=x,
            y=y,
            index=stream.index,
            nearest=pattern,
            margin=unknown,
            logit_margin=unknown,
            low=low,
            high=high,
        )

    def advance(
        self, state: _SquareState, stream: Stream, ages: Sequence[int], passes: int
    ) -> _SquareState:
        """`passes` queries; all their random words are drawn at once."""
        words = self._draw(stream, ages, passes, self.words + state.x.shape[1])
        age = torch.tensor(ages, device=state.y.device)
        before = age.unsqueeze(1) + torch.arange(passes, device=state.y.device)  # (B, passes)
        is_counted = before < self.passes
        patches = self.patches(torch.bucketize(before - 1, self.halvings), words)
        for done in range(passes):
            is_checked = self.stop_at_success and done % CHECK_EVERY == 0
            if is_checked and bool((state.logit_margin <= 0).all()):
                break  # every row seems to fool the model
            candidate = self.propose(state, patches.select((slice(None), done)))
            if done == 0 and 0 in ages:  # the first query is the start itself
                candidate = where_rows(age == 0, state.nearest, candidate)
            logit_margin, margin = self.margins(candidate, state.y)
            if self.stop_at_success:  # a row that fooled the model waits for its verification
                kept = (logit_margin < state.logit_margin) & (state.logit_margin > 0)
            else:
                kept = state.is_nearer(logit_margin, margin)
            kept = kept & is_counted[:, done]
            state = replace(
                state,
                nearest=where_rows(kept, candidate, state.nearest),
                margin=torch.where(kept, margin, state.margin),
                logit_margin=torch.where(kept, logit_margin, state.logit_margin),
            )
        return state

    def _draw(self, stream: Stream, ages: Sequence[int], passes: int, words: int) -> Tensor:
        """(B, passes, words) in one draw per age: thousands of small draws would cost more than the
        queries."""
        drawn = torch.empty(len(ages), passes, words, dtype=torch.int64, device=stream.index.device)
        for age in set(ages):
            rows = torch.tensor(
                [row for row, other in enumerate(ages) if other == age], device=stream.index.device
            )
            drawn[rows] = (
                stream[rows].at("square", self.restart, "queries", age).words(passes, words)
            )
        return drawn

    @abstractmethod
    def round_side(self, side: int) -> int:
        """The edge that is used where the schedule gives `side`."""

    @abstractmethod
    def pattern(self, x: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) start points, before they are projected into the ball."""

    @abstractmethod
    def patches(self, halvings: Tensor, words: Tensor) -> Patches:
        """Patches halved so many times (B, P), from random words (B, P, W)."""

    @abstractmethod
    def propose(self, state: _SquareState, patches: Patches) -> Tensor:
        """(B, C, H, W) the next candidates, with these patches (B,)."""


class _LinfSquareSearch(_SquareSearch[SquarePatches]):
    """ℓ∞: vertical stripes of ±eps, then squares in which every channel is at one end of its
    range."""

    words = 2

    def round_side(self, side: int) -> int:
        return max(side, 1)

    def pattern(self, x: Tensor, stream: Stream) -> Tensor:
        channels, _, width = x.shape[1:]
        return x + self.threat.eps * signs_of(stream.words(channels, width)).to(x.dtype).unsqueeze(
            2
        )

    def patches(self, halvings: Tensor, words: Tensor) -> SquarePatches:
        window = Window.draw(words[..., :2], self.sides[halvings], *self.example.shape[2:])
        return SquarePatches(window, (words[..., 2:] >> 31) == 1)

    def propose(self, state: _SquareState, patches: SquarePatches) -> Tensor:
        assert state.low is not None and state.high is not None
        end = torch.where(patches.is_high[:, :, None, None], state.high, state.low)
        return torch.where(patches.window.mask(), end, state.nearest)


class _L2SquareSearch(_SquareSearch[BumpPatches]):
    """ℓ2: a grid of bumps, then the mass of one window moves into a new bump in another."""

    words = 5
    norm: ClassVar[str] = "l2"

    @cached_property
    def bumps(self) -> Tensor:
        height, width = self.example.shape[2:]
        return make_bumps(self.sides.tolist(), height, width, self.example, self.norm)

    def round_side(self, side: int) -> int:
        return max(side, 3) | 1  # an odd number

    def pattern(self, x: Tensor, stream: Stream) -> Tensor:
        channels, height, width = x.shape[1:]
        side = max(min(height, width) // 5, 1)
        tall, wide = height // side, width // side
        signs = signs_of(stream.words(channels, tall, wide)).to(x.dtype)
        turned = stream.at("turn").words(tall, wide) >> 31
        bump = make_bumps([side], side, side, x, self.norm)[0]
        # (B, 1, tall, wide, s, s)
        bumps = torch.where((turned == 1).view(-1, 1, tall, wide, 1, 1), bump.T, bump)
        tiles = (signs.view(-1, channels, tall, wide, 1, 1) * bumps).permute(0, 1, 2, 4, 3, 5)
        delta = torch.zeros_like(x)
        top, left = (height - tall * side) // 2, (width - wide * side) // 2
        delta[:, :, top : top + tall * side, left : left + wide * side] = tiles.reshape(
            len(x), channels, tall * side, wide * side
        )
        return self.fill_ball(x, delta)

    def patches(self, halvings: Tensor, words: Tensor) -> BumpPatches:
        side, size = self.sides[halvings], self.example.shape[2:]
        window, emptied = (
            Window.draw(words[..., first : first + 2], side, *size) for first in (0, 2)
        )
        return BumpPatches(
            halvings, window, emptied, (words[..., 4] >> 31) == 1, signs_of(words[..., 5:])
        )

    def propose(self, state: _SquareState, patches: BumpPatches) -> Tensor:
        """A new bump in one window, with the mass that another window and the rest of the ball
        give."""
        x, delta = state.x, state.nearest - state.x
        inside, emptied = patches.window.mask(), patches.emptied.mask()
        bump = patches.place(self.bumps) * inside
        old = delta * inside
        new = patches.signs.to(x.dtype)[:, :, None, None] * bump + old / (1e-12 + self.length(old))
        new = new / (1e-12 + self.length(new)) * self.new_length(delta, inside | emptied)
        moved = torch.where(inside, new, torch.where(emptied, torch.zeros_like(delta), delta))
        return geometry.project(self.fill_ball(x, moved), x, self.threat)

    def length(self, delta: Tensor, axes: tuple[int, ...] = (2, 3)) -> Tensor:
        """Length per channel, or over other axes, shaped to multiply the image."""
        return delta.square().sum(dim=axes, keepdim=True).sqrt()

    def new_length(self, delta: Tensor, windows: Tensor) -> Tensor:
        """Length per channel of a new bump: what is in both windows, and what the ball leaves."""
        spare = (self.threat.eps**2 - self.length(delta, (1, 2, 3)) ** 2).clamp_min(
            0
        ) / delta.shape[1]
        return (spare + self.length(delta * windows) ** 2).sqrt()

    def fill_ball(self, x: Tensor, delta: Tensor) -> Tensor:
        """The image with this perturbation, scaled to size eps."""
        return x + self.threat.eps * geometry.steepest(delta, "l2")


class _L1SquareSearch(_L2SquareSearch):
    """ℓ1: new bumps get more than the ball holds; the projection takes it from all pixels, and most
    become zero."""

    norm = "l1"

    def length(self, delta: Tensor, axes: tuple[int, ...] = (2, 3)) -> Tensor:
        return delta.abs().sum(dim=axes, keepdim=True)

    def new_length(self, delta: Tensor, windows: Tensor) -> Tensor:
        spare = (self.threat.eps - self.length(delta, (1, 2, 3))).clamp_min(0)
        return spare + delta.shape[1] * self.length(delta * windows)

    def fill_ball(self, x: Tensor, delta: Tensor) -> Tensor:
        """As it is, or scaled up if it is too small; both are projected afterwards."""
        return x + delta * (
            self.threat.eps / self.length(delta, (1, 2, 3)).clamp_min(1e-12)
        ).clamp_min(1)


SEARCHES: dict[str, type[_SquareSearch[Any]]] = {
    "linf": _LinfSquareSearch,
    "l2": _L2SquareSearch,
    "l1": _L1SquareSearch,
}
