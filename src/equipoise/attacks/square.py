"""Square attack [Andriushchenko2020]: random search with square patches, no gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.engine import Search, State, step_towards
from equipoise.attacks.gradients import Extra, GradientSource
from equipoise.attacks.patches import bumps, windows
from equipoise.attacks.worst_case import strike
from equipoise.core import checks, geometry
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

# After so many queries the share of pixels in a patch has been halved so often.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


def square(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    queries: int = 5000,
    share: float = 0.8,
    precision: str = "auto",
) -> Tensor:
    """Keep a random square of new colours whenever it lowers the margin between y and the best other class.

    Args are those of :func:`~equipoise.attacks.apgd.apgd`, with
        surrogate, extra: not used, since nothing here needs a gradient.
        queries: forward passes per image.
        share: of the pixels in the first squares; it shrinks as queries go by.

    Returns:
        (B, C, H, W), detached, inside the ball and [0, 1].
    """
    return strike([Square(queries, share)], model, x, y, threat=threat, stream=stream, surrogate=None, extra=None,
                  follow="model", precision=precision)


def square_stages(*, steps: int = 5000) -> list[Square]:
    """One stage of so many queries."""
    return [Square(checks.whole("steps", steps, least=1))]


@dataclass(frozen=True)
class Square:
    """A stage: Square from one random start; only where the margin is below `within`."""

    queries: int = 5000
    share: float = 0.8
    restart: int = 0
    within: float | None = None

    def __post_init__(self) -> None:
        checks.whole("queries", self.queries, least=1)
        checks.within("share", self.share, 0, 1)

    @property
    def name(self) -> str:
        """As it stands in rows and reports."""
        return ("square" + (f"-{self.restart + 1}" if self.restart else "")
                + ("" if self.queries == 5000 else f"@{self.queries}")
                + ("" if self.share == 0.8 else f"-{self.share:g}"))

    @property
    def cost(self) -> float:
        """In passes with a gradient."""
        return self.queries / 3

    def search(self, adversary: GradientSource, threat: Threat) -> Search:
        """The stage against this adversary's model."""
        kind = _Stripes if threat.norm == "linf" else _Bumps
        return kind(adversary, threat, self)


class _Random(ABC):
    """What both norms share: a candidate is kept if its margin is smaller.

    That of logits, as in the paper; where the smallest margin of all is wanted, that of probabilities.
    """

    words: int  # random words per query, besides a sign for every channel

    def __init__(self, adversary: GradientSource, threat: Threat, stage: Square) -> None:
        self.threat, self.stage = threat, stage
        self.passes = stage.queries + 1  # the start is looked at too
        self.query, self.persist = adversary.query(), adversary.persist

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        never = x.new_full((len(x),), torch.inf)
        begun = self.begin(x, chance.at("square", self.stage.restart))
        return {"x": x, "y": y, "nearest": geometry.project(begun, x, self.threat), "margin": never,
                "value": never.clone(), "age": torch.zeros_like(y)}

    @abstractmethod
    def begin(self, x: Tensor, chance: Stream) -> Tensor:
        """(B, C, H, W) where the search begins; still to be brought into the ball."""

    @abstractmethod
    def propose(self, s: State, side: Tensor, words: Tensor) -> Tensor:
        """(B, C, H, W) the next candidate of every row, with a square of its side (B,)."""

    def leg(self, state: State, chance: Stream, ages: Sequence[int], passes: int) -> None:
        channels, height, width = state["x"].shape[1:]
        drawn = self._drawn(chance, ages, passes, self.words + channels)
        planned = [[self.side(age + done, height, width) for age in ages] for done in range(passes)]
        sides = torch.tensor(planned, device=state["y"].device)
        self.draw_table(sorted({side for row in planned for side in row}), state["x"])
        for done in range(passes):
            candidate = self.propose(state, sides[done], drawn[:, done])
            if done == 0 and 0 in ages:
                candidate = step_towards(state["age"] == 0, state["nearest"], candidate)
            value, margin = self.query(candidate, state["y"])
            kept = value < state["value"]
            if self.persist:
                # The smallest margin of probabilities is wanted; where they saturate, logits still show the way.
                kept = (margin < state["margin"]) | (kept & (margin == state["margin"]))
            else:  # a row that fooled the model waits for the end of the leg
                kept &= state["margin"] > 0
            kept &= state["age"] < self.passes
            state["nearest"] = step_towards(kept, candidate, state["nearest"])
            state["value"] = torch.where(kept, value, state["value"])
            state["margin"] = torch.where(kept, margin, state["margin"])
            state["age"] = state["age"] + 1

    @abstractmethod
    def draw_table(self, sides: Sequence[int], like: Tensor) -> None:
        """Whatever patches of these sides need."""

    def _drawn(self, chance: Stream, ages: Sequence[int], passes: int, words: int) -> Tensor:
        """(B, passes, words) in one draw per age: thousands of small draws would cost more than the queries."""
        drawn = torch.empty(len(ages), passes, words, dtype=torch.int64, device=chance.index.device)
        for age in set(ages):
            rows = torch.tensor([row for row, other in enumerate(ages) if other == age], device=chance.index.device)
            drawn[rows] = chance[rows].at("square", self.stage.restart, "queries", age).words(passes, words)
        return drawn

    def side(self, age: int, height: int, width: int) -> int:
        """Edge of the square at this age."""
        pixels = self.stage.share * height * width / 2 ** sum(age - 1 > limit for limit in HALVINGS)
        return min(self.shape(round(math.sqrt(pixels))), height, width)

    @abstractmethod
    def shape(self, side: int) -> int:
        """The edge that is used where the schedule says `side`."""


def _below(words: Tensor, high: Tensor) -> Tensor:
    """(B,) uniform in 0 … high − 1, for a `high` of every row."""
    return (words * high) >> 32


def _signs(words: Tensor) -> Tensor:
    """(B, n) words → ±1."""
    return (words >> 31).to(torch.float32) * 2 - 1


class _Stripes(_Random):
    """ℓ∞: vertical stripes of ±eps, then squares of ±eps per channel."""

    words = 2

    def draw_table(self, sides: Sequence[int], like: Tensor) -> None:
        """A square of one colour needs none."""

    def begin(self, x: Tensor, chance: Stream) -> Tensor:
        channels, _, width = x.shape[1:]
        signs = _signs(chance.words(channels, width)).to(x.dtype)
        return x + self.threat.eps * signs.unsqueeze(2)

    def propose(self, s: State, side: Tensor, words: Tensor) -> Tensor:
        x = s["x"]
        channels, height, width = x.shape[1:]
        inside = windows(_below(words[:, 0], height - side + 1), _below(words[:, 1], width - side + 1),
                         side, height, width)
        colours = _signs(words[:, 2 : 2 + channels]).to(x.dtype).view(-1, channels, 1, 1)
        coloured = torch.where(colours > 0, s["high"], s["low"])
        return torch.where(inside, coloured, s["nearest"])

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        low, high = geometry.bounds(x, self.threat)
        return {**super().start(x, y, chance), "low": low, "high": high}

    def shape(self, side: int) -> int:
        return max(side, 1)


class _Bumps(_Random):
    """ℓ2: a grid of bumps, then the mass of one window moves into a new bump in another."""

    words = 5

    def begin(self, x: Tensor, chance: Stream) -> Tensor:
        channels, height, width = x.shape[1:]
        side = max(min(height, width) // 5, 1)
        tall, wide = height // side, width // side
        signs = _signs(chance.words(channels, tall, wide)).to(x.dtype)
        turned = chance.at("turn").words(tall, wide) >> 31
        bump = bumps([side], side, side, x)[0]
        each = torch.where((turned == 1).view(-1, 1, tall, wide, 1, 1), bump.T, bump)  # (B, 1, tall, wide, s, s)
        tiles = (signs.view(-1, channels, tall, wide, 1, 1) * each).permute(0, 1, 2, 4, 3, 5)
        delta = torch.zeros_like(x)
        top, left = (height - tall * side) // 2, (width - wide * side) // 2
        delta[:, :, top : top + tall * side, left : left + wide * side] = tiles.reshape(
            len(x), channels, tall * side, wide * side)
        return x + self.threat.eps * geometry.steepest(delta, "l2")

    def propose(self, s: State, side: Tensor, words: Tensor) -> Tensor:
        x, delta = s["x"], s["nearest"] - s["x"]
        channels, height, width = x.shape[1:]
        tops, lefts = height - side + 1, width - side + 1
        top, left = _below(words[:, 0], tops), _below(words[:, 1], lefts)
        here = windows(top, left, side, height, width)
        there = windows(_below(words[:, 2], tops), _below(words[:, 3], lefts), side, height, width)
        both = here | there
        signs = _signs(words[:, 5 : 5 + channels]).to(x.dtype).view(-1, channels, 1, 1)
        bump = self._placed(x, side, top, left, turned=(words[:, 4] >> 31) == 1)
        old = delta * here
        new = signs * bump + old / (1e-12 + _length(old))
        spare = (self.threat.eps**2 - _length(delta, channels=True) ** 2).clamp_min(0) / channels
        new = new / (1e-12 + _length(new)) * (spare + _length(delta * both) ** 2).sqrt()
        moved = torch.where(here, new, torch.where(there, torch.zeros_like(delta), delta))
        return geometry.project(x + self.threat.eps * geometry.steepest(moved, "l2"), x, self.threat)

    def draw_table(self, sides: Sequence[int], like: Tensor) -> None:
        self.sides = torch.tensor(sides, device=like.device)
        self.table = bumps(sides, like.shape[2], like.shape[3], like)

    def _placed(self, x: Tensor, side: Tensor, top: Tensor, left: Tensor, turned: Tensor) -> Tensor:
        """(B, 1, H, W) the bump of each row's size at its place."""
        height, width = x.shape[2:]
        which = torch.searchsorted(self.sides, side)
        i = (torch.arange(height, device=x.device) - top.view(-1, 1)).clamp(0, height - 1)  # (B, H)
        j = (torch.arange(width, device=x.device) - left.view(-1, 1)).clamp(0, width - 1)
        # A square bump turned by a transposition: rows and columns of the table change places.
        a, b = i.unsqueeze(2).expand(-1, -1, width), j.unsqueeze(1).expand(-1, height, -1)
        flip = turned.view(-1, 1, 1)
        first, second = torch.where(flip, b, a), torch.where(flip, a, b)
        least = min(height, width) - 1
        placed = self.table[which.view(-1, 1, 1), first.clamp(max=least), second.clamp(max=least)]
        return placed.unsqueeze(1) * windows(top, left, side, height, width)

    def shape(self, side: int) -> int:
        side = max(side, 3)
        return side + 1 - side % 2


def _length(delta: Tensor, *, channels: bool = False) -> Tensor:
    """Euclidean length per channel (or of the whole image), shaped to multiply it."""
    return delta.square().sum(dim=(1, 2, 3) if channels else (2, 3), keepdim=True).sqrt()
