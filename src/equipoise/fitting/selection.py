"""Choosing among mixtures of one kind, such as the ranges of a gate, by what they keep on images held out.

[Bai2024, D.1] sets α_min "by enforcing a desired level of either clean validation accuracy or robustness". Robustness
of a candidate is not known before it is attacked, and attacking each one is dear. So a pool of attacked images is kept:
every candidate is judged on all of it, the best one is attacked itself, its images join the pool, until the best one
has been. What is chosen has always met its own attack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.fitting.candidates import CandidateLogits, Pool
from equipoise.mixing import GatedClassifier, MixedClassifier

FIRST = 3  # candidates attacked before any choice
ROUNDS = 6
ROUNDING = 1e-6


@dataclass(frozen=True)
class Selected:
    """A chosen mixture and what it reached on the images that chose it, which flatters it."""

    model: MixedClassifier
    right: Tensor  # (N,) bool: clean images that it answers rightly
    stands: Tensor  # (N,) bool: images that it answers rightly under every attack of the pool
    met: bool  # whether it keeps the target
    strikes: int  # candidates that were attacked

    @property
    def clean(self) -> float:
        """Share of clean images answered rightly."""
        return float(self.right.float().mean())

    @property
    def attacked(self) -> float:
        """Share of images answered rightly under every attack of the pool."""
        return float(self.stands.float().mean())

    def facts(self) -> dict[str, float | bool | int | str]:
        """As it stands beside the mixture."""
        return {"clean": round(self.clean, 6), "attacked": round(self.attacked, 6), "met": self.met,
                "strikes": self.strikes, "mixture": self.model.extra_repr()}


class Selection:
    """Candidates with the same sides (of one map and one gate, with other alphas, ranges, scales, shifts) and a pool.

    Args:
        candidates: the mixtures to choose from.
        pool: the images that choose, and the attack on a candidate.
    """

    def __init__(self, candidates: Sequence[MixedClassifier], pool: Pool) -> None:
        checks.require(len(candidates) > 0, "candidates", "be given", 0)
        self.candidates, self.pool = candidates, pool
        seen = pool.arena.look(candidates[0])
        self.right = torch.stack([seen.right(each) for each in candidates])
        self.stands = torch.ones_like(self.right)
        self.accuracy = self.right.float().mean(dim=1)
        self.struck: list[int] = []

    def choose(self, *, robust: float | None = None, clean: float | None = None, rounds: int = ROUNDS) -> Selected:
        """The candidate with the highest clean accuracy that keeps a robust one, or the other way round.

        Args:
            robust: least accuracy over the pool of attacked images; the most accurate candidate on clean images wins.
            clean: least accuracy on clean images; the most robust candidate wins. One of the two is given.
            rounds: candidates attacked at most, after the first few.
        """
        one = (robust is None) != (clean is None)
        checks.require(one, "robust or clean", "be given, one of them", (robust, clean))
        if not self.struck:
            order, last = self.accuracy.argsort(stable=True).tolist(), len(self.candidates) - 1
            for number in dict.fromkeys(order[last * place // (FIRST + 1)] for place in range(1, FIRST + 1)):
                self._attack(number)
        for _ in range(rounds):
            number = _best(self.accuracy, self.kept, robust, clean)
            if number in self.struck:
                break
            self._attack(number)
        own = torch.tensor(self.struck, device=self.accuracy.device)
        number = self.struck[_best(self.accuracy[own], self.kept[own], robust, clean)]
        held, least = (self.kept, robust) if robust is not None else (self.accuracy, clean)
        met = float(held[number]) >= float(least or 0) - ROUNDING
        return Selected(self.candidates[number], self.right[number], self.stands[number], met, len(self.struck))

    @property
    def kept(self) -> Tensor:
        """(candidates,) accuracy over the pool so far."""
        return self.stands.float().mean(dim=1)

    def _attack(self, number: int) -> None:
        seen = self.pool.struck(self.candidates[number])
        for row, candidate in enumerate(self.candidates):
            self.stands[row] &= seen.right(candidate)
        self.struck.append(number)


def _best(accuracy: Tensor, stands: Tensor, robust: float | None, clean: float | None) -> int:
    """Of those that keep the target, the best in the other respect; else the one that comes nearest to it."""
    held, other, least = (stands, accuracy, robust) if robust is not None else (accuracy, stands, clean)
    keeps = held >= float(least or 0) - ROUNDING
    # Of equals in the first respect, the better in the second.
    score = torch.where(keeps, 10 + other + 1e-3 * held, held + 1e-3 * other)
    return int(score.argmax())


def shift_for(model: GatedClassifier, seen: CandidateLogits, clean: float, shifts: Sequence[float]) -> GatedClassifier:
    """The same gate with the greatest shift, and so the most cautious, that still reaches a clean accuracy.

    [Bai2024, C.2]; where none does, the one that comes nearest.
    """
    made = [model.with_range(*model.range, shift=shift) for shift in sorted(shifts)]
    reached = [float(seen.right(each).float().mean()) for each in made]
    keeping = [each for each, value in zip(made, reached, strict=True) if value >= clean]
    return keeping[-1] if keeping else made[max(range(len(made)), key=lambda at: reached[at])]
