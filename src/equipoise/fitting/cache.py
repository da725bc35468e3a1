"""What the search looks at: logits, computed once. No model is run while numbers are tried."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.core.checks import InputError

LEAST = 50
ANY = -1  # in `said`: whatever suits the adversary


@dataclass(frozen=True, eq=False)
class Cache:
    """Logits of the robust model h and classes of the accurate model g on N fitting images."""

    clean: Tensor  # (N, K) logits of h
    attacked: Tensor  # (P, N, K) logits of h at P attacked points per image
    labels: Tensor  # (N,)
    index: Tensor  # (N,) positions in the split
    accurate: Tensor | None = None  # (N,) classes that g gives the clean images
    said: Tensor | None = None  # (P, N) classes that g gives the attacked points, or ANY; None is ANY everywhere
    soft: Tensor | None = None  # (N, K) logits of g on the clean images, if it has logits

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def standing(self) -> Tensor:
        """(N,) images that h answers rightly, clean and at every attacked point."""
        right = torch.cat([self.clean.unsqueeze(0), self.attacked]).argmax(dim=2) == self.labels
        return right.all(dim=0)

    def take(self, rows: Tensor) -> Cache:
        """Some of the images."""
        return dataclasses.replace(
            self, clean=self.clean[rows], attacked=self.attacked[:, rows], labels=self.labels[rows],
            index=self.index[rows], accurate=None if self.accurate is None else self.accurate[rows],
            said=None if self.said is None else self.said[:, rows], soft=None if self.soft is None else self.soft[rows])

    def join(self, attacked: Tensor, said: Tensor | None = None) -> Cache:
        """The same images with further attacked points."""
        told = said
        if (self.said is None) != (said is None):
            ours, theirs = (torch.full(t.shape[:2], ANY) for t in (self.attacked, attacked))
            told = torch.cat([ours if self.said is None else self.said, theirs if said is None else said])
        elif self.said is not None and said is not None:
            told = torch.cat([self.said, said])
        return dataclasses.replace(self, attacked=torch.cat([self.attacked, attacked]), said=told)

    def halves(self, seed: int) -> tuple[Cache, Cache]:
        """One half to choose by, one to promise on; a function of the seed and of which images there are."""
        order = rng.stream(seed, "halves", self.index).words().argsort(stable=True)
        half = len(order) // 2
        return self.take(order[:half].sort().values), self.take(order[half:].sort().values)


def enough(count: int) -> None:
    """Refuse too few images."""
    checks.require(count >= LEAST, "count", f"give at least {LEAST} images to fit on", count)


def checked(cache: Cache) -> Cache:
    """Refuse what cannot be fitted, in one sentence."""
    enough(len(cache))
    for name, z in (("clean", cache.clean), ("attacked", cache.attacked)):
        if not bool(z.isfinite().all()):
            raise InputError(f"the robust model must answer with finite logits, got NaN or inf on {name} images")
    checks.labels(cache.labels, cache.clean.shape[1], len(cache))
    standing = cache.standing
    if not bool(standing.any()):
        raise InputError("the robust model must be right on at least one attacked image, got none of "
                         f"{len(cache)}: there is no robustness to keep")
    answers = cache.clean.argmax(dim=1)
    if cache.accurate is not None and torch.equal(cache.accurate, answers):
        raise InputError("the accurate and the robust model must differ, got the same answer on all "
                         f"{len(cache)} images: mixing them changes nothing")
    return cache
