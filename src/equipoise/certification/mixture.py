"""The smoothed classifier h inside a mixture (1 − alpha)·g + alpha·h, where nothing is known about g."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise.certification import bounds, radii
from equipoise.certification.bounds import Floats
from equipoise.certification.certificate import ABSTAIN, Certificate
from equipoise.core import checks
from equipoise.core.records import Row

Ints = NDArray[np.int64]
# From a lower bound of h's class alone; "3.5" with the paper's constant [Bai2024].
THEOREMS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "ours": radii.one_sided,
    "A.2": lambda p, sigma, alpha: radii.paper(p, 1 - p, sigma, alpha),
    "3.5": radii.lipschitz,
}


def keeps_class(probabilities: Tensor, alpha: float) -> Tensor:
    """(B,) whether h's margin alone decides the mixture, whatever g says [Bai2024, Lemma 3.2].

    Args:
        probabilities: (B, K) of h.
        alpha: weight of h, at least 1/2.
    """
    top = probabilities.topk(2, dim=1).values
    return top[:, 0] - top[:, 1] >= radii.lemma_margin(alpha)


def answer(votes: Floats, n: Floats, chosen: ArrayLike, accurate: ArrayLike, alpha: float, failure: ArrayLike) -> Ints:
    """(B,) class of the mixture (1 − alpha)·onehot(g) + alpha·h from votes for h, or ABSTAIN.

    Only the class of g and that of h can win. Each is tested with half of the failure (all of it where they
    agree): it wins if its lower bound beats every other class's upper bound by what g adds or takes. To be
    wrong, the test against the one class that truly wins must fail, so no union over classes is needed.

    Args:
        votes: (B, K) of the smoothed classifier.
        n: (B,) their sums.
        chosen: (B,) class of h, chosen on other samples.
        accurate: (B,) class of g.
        alpha: weight of h, at least 1/2.
        failure: (B,) or () probability with which an answer may be wrong.
    """
    bounds.matching(votes, n)
    ours, theirs = np.asarray(chosen), np.asarray(accurate)
    level = np.broadcast_to(failure, ours.shape) / np.where(ours == theirs, 1, 2)
    found = np.where(_wins(votes, n, theirs, theirs, alpha, level), theirs, ABSTAIN)
    return np.where(_wins(votes, n, ours, theirs, alpha, level), ours, found).astype(np.int64)


def _wins(
    votes: Floats, n: Floats, candidate: Ints, accurate: Ints, alpha: float, failure: Floats
) -> NDArray[np.bool_]:
    rows = np.arange(len(votes))
    gift = np.zeros_like(votes)
    gift[rows, accurate] = radii.lemma_margin(alpha)
    own = bounds.lower(votes[rows, candidate], n, failure / 2) + gift[rows, candidate]
    others = bounds.upper(votes, n[:, None], failure[:, None] / 2) + gift
    others[rows, candidate] = -np.inf
    return np.asarray(own > others.max(axis=1))


@dataclass(frozen=True)
class Base:
    """What certification found about one smoothed base on N labelled images, and what g says there."""

    sigma: float
    chosen: Ints  # (N,) class of h
    lower: Floats  # (N,) lower bound of its probability
    accurate: Ints  # (N,) class of g
    gap: Floats  # (N,) estimated probability of h's class less that of g's class, both under h
    labels: Ints  # (N,)

    @staticmethod
    def of(found: Certificate, sigma: float, accurate: Tensor, labels: Tensor) -> Base:
        """From certificates (of any alpha: bounds do not depend on it)."""
        return Base(sigma, found.chosen.numpy(), found.lower.numpy(), accurate.cpu().numpy(),
                    gap_of(found, accurate.cpu()).numpy(), labels.cpu().numpy())

    @staticmethod
    def of_rows(rows: Sequence[Row], sigma: float) -> Base:
        """From the rows of a certified mixture; `sigma` where rows have none."""
        column = {key: np.array([row[key] for row in rows]) for key in ("top", "lower", "accurate", "gap", "label")}
        return Base(rows[0].get("sigma", sigma), *column.values())

    def radius(self, alpha: float, theorem: str = "ours") -> Floats:
        """(N,) certified radius of the mixture by one of THEOREMS; zero where h's class is wrong."""
        return np.where(self.chosen == self.labels, THEOREMS[theorem](self.lower, self.sigma, alpha), 0.0)


def winners(base: Base, alpha: float) -> Ints:
    """(N,) class of the mixture on clean images: an estimate, from estimated probabilities of h."""
    return np.where(base.gap < radii.lemma_margin(alpha), base.accurate, base.chosen)


def clean_accuracy(base: Base, alpha: float) -> float:
    """Accuracy of the mixture on clean images: an estimate."""
    return float((winners(base, alpha) == base.labels).mean())


def alpha_for(base: Base, clean: float) -> float:
    """The largest alpha in [1/2, 1] with which the mixture's clean accuracy is at least `clean`.

    The accuracy only changes where the margin of h over g's class equals (1 − alpha)/alpha, so that every
    candidate is known; alpha should be chosen on images that are not evaluated afterwards.
    """
    checks.within("clean", clean, 0, 1)
    found = next((alpha for alpha in _candidates(base) if clean_accuracy(base, alpha) >= clean), None)
    if found is None:
        raise checks.InputError(f"`clean` must be reachable with alpha in [0.5, 1], at most {most_clean(base):g}, "
                                f"got {clean:g}")
    return found


def most_clean(base: Base) -> float:
    """The best clean accuracy that any alpha in [1/2, 1] reaches: an estimate."""
    return max(clean_accuracy(base, alpha) for alpha in _candidates(base))


def _candidates(base: Base) -> list[float]:
    """Falling; just above a margin g has won that image, so the last bits go to g."""
    gaps = np.unique(base.gap[(base.gap >= 0) & (base.gap < 1)])
    return [1.0, *np.maximum(1 / (1 + gaps + 1e-9), 0.5).tolist()]


def frontier(
    mixtures: Sequence[tuple[Base, float]], reach: ArrayLike, theorem: str = "ours"
) -> tuple[Floats, list[int]]:
    """Certified accuracy at every radius of the best of some mixtures with one clean accuracy.

    Each is a base with the alpha that :func:`alpha_for` found for it, so that sigma and alpha vary together
    [Bai2024, Figures 6 and 7]. Any alpha is served by the same votes: the bound of a base does not know it.

    Returns:
        (R,) certified accuracy and, per radius, which mixture it is of.
    """
    checks.require(len(mixtures) > 0, "mixtures", "hold at least one", 0)
    wanted = np.maximum(np.asarray(reach, dtype=np.float64), 1e-300)
    table = np.stack([(base.radius(alpha, theorem)[:, None] >= wanted).mean(axis=0) for base, alpha in mixtures])
    return table.max(axis=0), table.argmax(axis=0).tolist()


def gap_of(found: Certificate, accurate: Tensor) -> Tensor:
    """(B,) how far h puts its class above g's class: estimated, not bounded."""
    own = found.shares.gather(1, found.chosen.unsqueeze(1))
    return (own - found.shares.gather(1, accurate.unsqueeze(1))).squeeze(1)
