"""The smoothed classifier h inside a mixture (1 − alpha)·g + alpha·h, where nothing is assumed about g."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.certification import radii
from equipoise.certification.certificate import ABSTAIN
from equipoise.certification.radii import Floats, Ints
from equipoise.core import checks
from equipoise.core.rows import CertificateRow

# Radii from a lower bound of the probability of h's class alone; "3.5" with the paper's constant [Bai2024].
THEOREMS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "ours": radii.one_sided,
    "A.2": lambda p, sigma, alpha: radii.theorem_a2(p, 1 - p, sigma, alpha),
    "3.5": radii.theorem_3_5,
}


def predict_from_votes(votes: Floats, n: Floats, top: ArrayLike, accurate: ArrayLike, alpha: float,
                       failure: ArrayLike) -> Ints:
    """(B,) class of the mixture (1 − alpha)·onehot(g) + alpha·h from votes for h, or ABSTAIN.

    Only the class of g and that of h can win. Each is tested with half of the failure probability (all of it where they
    agree): it wins if its lower bound exceeds every other class's upper bound, with the weight of g added to g's class.
    To be wrong, the test against the one class that truly wins must fail, so no union over classes is needed.

    Args:
        votes, n: (B, K) of h, and their sums (B,).
        top, accurate: (B,) class of h, selected on other samples, and of g.
        alpha: weight of h, at least 1/2.
        failure: (B,) or () probability with which a prediction may be wrong.
    """
    radii.check_votes(votes, n)
    smoothed, other = np.asarray(top), np.asarray(accurate)
    level = np.broadcast_to(failure, smoothed.shape) / np.where(smoothed == other, 1, 2)
    classes = np.where(_wins(votes, n, other, other, alpha, level), other, ABSTAIN)
    return np.where(_wins(votes, n, smoothed, other, alpha, level), smoothed, classes).astype(np.int64)


def _wins(votes: Floats, n: Floats, candidate: Ints, accurate: Ints, alpha: float,
          failure: Floats) -> NDArray[np.bool_]:
    rows = np.arange(len(votes))
    bonus = np.zeros_like(votes)
    bonus[rows, accurate] = radii.lemma_margin(alpha)
    own = radii.lower_bound(votes[rows, candidate], n, failure / 2) + bonus[rows, candidate]
    others = radii.upper_bound(votes, n[:, None], failure[:, None] / 2) + bonus
    others[rows, candidate] = -np.inf
    return np.asarray(own > others.max(axis=1))


@dataclass(frozen=True)
class SmoothedBase:
    """Certificates of one smoothed classifier h on N labelled images, with the classes of g; valid for any alpha."""

    sigma: float
    top: Ints  # (N,) class of h
    lower: Floats  # (N,) lower bound of its probability
    accurate: Ints  # (N,) class of g
    gap: Floats  # (N,) estimated probability of h's class minus that of g's class, both under h
    labels: Ints  # (N,)

    @staticmethod
    def of_rows(rows: Sequence[CertificateRow]) -> SmoothedBase:
        """From the rows of a certified mixture."""
        columns = zip(*((row.top, row.lower, row.accurate, row.gap, row.label) for row in rows), strict=True)
        return SmoothedBase(rows[0].sigma, *(np.array(column) for column in columns))

    def radius(self, alpha: float, theorem: str = "ours") -> Floats:
        """(N,) certified radius of the mixture by one of THEOREMS; zero where h's class is wrong."""
        return np.where(self.top == self.labels, THEOREMS[theorem](self.lower, self.sigma, alpha), 0.0)

    def correct(self, alpha: float) -> NDArray[np.bool_]:
        """(N,) whether the mixture classifies the clean image correctly: estimated from the vote shares of h.

        A tie, as of unanimous votes at alpha 1/2, is correct only if both classes are.
        """
        margin, by_accurate, by_top = radii.lemma_margin(alpha), self.accurate == self.labels, self.top == self.labels
        return np.asarray(np.where(self.gap < margin, by_accurate, by_top & (by_accurate | (self.gap > margin))))

    def clean_accuracy(self, alpha: float) -> float:
        """Accuracy of the mixture on clean images: an estimate."""
        return float(self.correct(alpha).mean())

    def largest_alpha(self, clean: float) -> float:
        """The largest alpha in [1/2, 1] with which the mixture's clean accuracy is at least `clean`.

        The accuracy only changes where the margin of h over g's class equals (1 − alpha)/alpha, so all candidates are
        known. Alpha should be selected on images that are not evaluated afterwards.
        """
        checks.within("clean", clean, 0, 1)
        best = self.best_clean_accuracy()
        checks.require(clean <= best, "clean", f"be reachable with alpha in [0.5, 1], at most {best:g}", clean)
        return next(alpha for alpha in self._candidates() if self.clean_accuracy(alpha) >= clean)

    def best_clean_accuracy(self) -> float:
        """The best clean accuracy of any alpha in [1/2, 1]: an estimate."""
        return max(self.clean_accuracy(alpha) for alpha in self._candidates())

    def _candidates(self) -> list[float]:
        """In falling order, each just small enough for g to win the images of one gap."""
        gaps = np.unique(self.gap[(self.gap >= 0) & (self.gap < 1)])
        return [1.0, *np.maximum(1 / (1 + gaps + 1e-9), 0.5).tolist()]


def frontier(mixtures: Sequence[tuple[SmoothedBase, float]], at: ArrayLike,
             theorem: str = "ours") -> tuple[Floats, list[int]]:
    """Certified accuracy, at every radius, of the best of some mixtures (base, alpha).

    With the alphas of :meth:`SmoothedBase.largest_alpha` all have one clean accuracy, and sigma and alpha vary together
    [Bai2024, Figures 6 and 7]. Any alpha can use the same votes: the bound of a base does not depend on it.

    Returns:
        (R,) certified accuracy and, per radius, the position of its mixture.
    """
    checks.require(len(mixtures) > 0, "mixtures", "hold at least one", 0)
    radius = np.maximum(np.asarray(at, dtype=np.float64), 1e-300)
    accuracy = np.stack([(base.radius(alpha, theorem)[:, None] >= radius).mean(axis=0) for base, alpha in mixtures])
    return accuracy.max(axis=0), accuracy.argmax(axis=0).tolist()
