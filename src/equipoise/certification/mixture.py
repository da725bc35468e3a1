"""The smoothed classifier h inside a mixture (1 − alpha)·g + alpha·h, where nothing is assumed
about g."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from equipoise.certification import radii
from equipoise.certification.certificate import ABSTAIN, Certificate, SmoothingPlan
from equipoise.certification.differences import exceeds
from equipoise.certification.radii import Floats, Ints
from equipoise.core import checks
from equipoise.core.rows import CertificateRow


class Theorem(Protocol):
    """A radius of the mixture from bounds on probabilities of h."""

    def __call__(self, p: Floats, sigma: float, alpha: float, q: Floats | None = None) -> Floats:
        """(N,) radius from a lower bound p of h's class and an upper bound q of every other one, 1
        − p if not given."""


def _our_radius(p: Floats, sigma: float, alpha: float, q: Floats | None = None) -> Floats:
    return radii.one_sided(p, sigma, alpha) if q is None else radii.two_sided(p, q, sigma, alpha)


def _theorem_a2(p: Floats, sigma: float, alpha: float, q: Floats | None = None) -> Floats:
    return radii.theorem_a2(p, 1 - p if q is None else q, sigma, alpha)


# Ours and those of [Bai2024]; Theorem 3.5 with the smallest Lipschitz constant, and with the
# paper's.
THEOREMS: dict[str, Theorem] = {
    "ours": _our_radius,
    "A.2": _theorem_a2,
    "lipschitz": partial(radii.theorem_3_5, constant=radii.SHARP_CONSTANT),
    "3.5": radii.theorem_3_5,
}
THEOREM_NAMES = {
    "ours": "ours",
    "A.2": "Theorem A.2",
    "lipschitz": "3.5, smallest constant",
    "3.5": "Theorem 3.5",
}


def at_alpha(certificate: Certificate, plan: SmoothingPlan) -> Certificate:
    """The certificate of the mixture at the alpha of `plan`, from the same bounds.

    They do not depend on alpha, so that the certificates of all alphas hold together with one
    failure probability. It must be one of
    :data:`~equipoise.certification.certificate.SHARED_BOUNDS`.
    """
    bounds = radii.ProbabilityBounds(certificate.lower.numpy(), certificate.upper.numpy())
    radius = torch.from_numpy(radii.VoteRule(plan).radius(bounds))
    return replace(
        certificate, radius=radius, predicted=torch.where(radius > 0, certificate.top, ABSTAIN)
    )


def predict_from_votes(
    votes: Floats, n: Floats, top: ArrayLike, accurate: ArrayLike, alpha: float, failure: ArrayLike
) -> Ints:
    """(B,) class of the mixture (1 − alpha)·onehot(g) + alpha·h from votes for h, or ABSTAIN.

    Only the class of g and that of h can win. Either wins if
    :func:`~equipoise.certification.differences.exceeds` says so against every other class, with the
    weight of g added to g's class. If one of the two truly wins, only the test of the other against
    it can fail, so it gets the whole failure probability; against any third class both tests could
    fail, and get half of it each.

    Args:
        votes, n: (B, K) of h, and their sums (B,).
        top, accurate: (B,) class of h, selected on other samples, and of g.
        alpha: weight of h, at least 1/2.
        failure: (B,) or () probability with which a prediction may be wrong.
    """
    radii.check_votes(votes, n)
    smoothed, other = np.asarray(top), np.asarray(accurate)
    level = np.broadcast_to(failure, smoothed.shape).astype(np.float64)
    classes = np.where(_wins(votes, n, other, smoothed, other, alpha, level), other, ABSTAIN)
    return np.where(
        _wins(votes, n, smoothed, other, other, alpha, level), smoothed, classes
    ).astype(np.int64)


def _wins(
    votes: Floats,
    n: Floats,
    candidate: Ints,
    rival: Ints,
    accurate: Ints,
    alpha: float,
    failure: Floats,
) -> NDArray[np.bool_]:
    """(B,) whether `candidate` wins; `rival` is the other class that could."""
    rows, margin = np.arange(len(votes)), radii.lemma_margin(alpha)
    own, wins = votes[rows, candidate], np.ones(len(votes), dtype=bool)
    for label in range(votes.shape[1]):
        level = np.where((rival == label) | (rival == candidate), failure, failure / 2)
        ahead = margin * ((accurate == label).astype(float) - (accurate == candidate))
        tested = (wins & (candidate != label)).nonzero()[0]
        wins[tested] = exceeds(
            own[tested], votes[tested, label], n[tested], ahead[tested], level[tested]
        )
    return wins


@dataclass(frozen=True)
class SmoothedBase:
    """Certificates of one smoothed classifier h on N labelled images, with the classes of g; valid
    for any alpha."""

    sigma: float
    top: Ints  # (N,) class of h
    lower: Floats  # (N,) lower bound of its probability
    accurate: Ints  # (N,) class of g
    gap: Floats  # (N,) estimated probability of h's class minus that of g's class, both under h
    labels: Ints  # (N,)
    # (N,) upper bound of every other class's probability; if None, 1 − lower
    upper: Floats | None = None

    @staticmethod
    def of_rows(rows: Sequence[CertificateRow]) -> SmoothedBase:
        """From the rows of a certified mixture, at one of its alphas."""
        columns = zip(
            *((row.top, row.lower, row.accurate, row.gap, row.label) for row in rows), strict=True
        )
        return replace(
            SmoothedBase(rows[0].sigma, *map(np.array, columns)), upper=upper_bounds(rows)
        )

    def radius(self, alpha: float, theorem: str = "ours") -> Floats:
        """(N,) certified radius of the mixture by one of THEOREMS; zero where h's class is
        wrong."""
        radius = THEOREMS[theorem](self.lower, self.sigma, alpha, self.upper)
        return np.where(self.top == self.labels, radius, 0.0)

    def correct(self, alpha: float) -> NDArray[np.bool_]:
        """(N,) whether the mixture classifies the clean image correctly: estimated from the vote
        shares of h.

        A tie, as of unanimous votes at alpha 1/2, is correct only if both classes are.
        """
        margin, by_accurate, by_top = (
            radii.lemma_margin(alpha),
            self.accurate == self.labels,
            self.top == self.labels,
        )
        return np.asarray(
            np.where(self.gap < margin, by_accurate, by_top & (by_accurate | (self.gap > margin)))
        )

    def clean_accuracy(self, alpha: float) -> float:
        """Accuracy of the mixture on clean images: an estimate."""
        return float(self.correct(alpha).mean())

    def largest_alpha(self, clean: float) -> float:
        """The largest alpha in [1/2, 1] with which the mixture's clean accuracy is at least
        `clean`.

        The accuracy only changes where the margin of h over g's class equals (1 − alpha)/alpha, so
        all candidates are known. Alpha should be selected on images that are not evaluated
        afterwards.
        """
        checks.within("clean", clean, 0, 1)
        best = self.best_clean_accuracy()
        checks.require(
            clean <= best, "clean", f"be reachable with alpha in [0.5, 1], at most {best:g}", clean
        )
        return next(alpha for alpha in self._candidates() if self.clean_accuracy(alpha) >= clean)

    def best_clean_accuracy(self) -> float:
        """The best clean accuracy of any alpha in [1/2, 1]: an estimate."""
        return max(self.clean_accuracy(alpha) for alpha in self._candidates())

    def _candidates(self) -> list[float]:
        """In falling order, each just small enough for g to win the images of one gap."""
        gaps = np.unique(self.gap[(self.gap >= 0) & (self.gap < 1)])
        return [1.0, *np.maximum(1 / (1 + gaps + 1e-9), 0.5).tolist()]


def upper_bounds(rows: Sequence[CertificateRow]) -> Floats | None:
    """(N,) upper bounds of the other classes' probabilities; None for certificates from one
    side."""
    return None if any(row.upper is None for row in rows) else np.array([row.upper for row in rows])


def frontier(
    mixtures: Sequence[tuple[SmoothedBase, float]], at: ArrayLike, theorem: str = "ours"
) -> tuple[Floats, list[int]]:
    """Certified accuracy, at every radius, of the best of some mixtures (base, alpha).

    With the alphas of :meth:`SmoothedBase.largest_alpha` all have one clean accuracy, and sigma and
    alpha vary together [Bai2024, Figures 6 and 7]. Any alpha can use the same votes: the bound of a
    base does not depend on it.

    Returns:
        (R,) certified accuracy and, per radius, the position of its mixture.
    """
    checks.require(len(mixtures) > 0, "mixtures", "hold at least one", 0)
    radius = np.maximum(np.asarray(at, dtype=np.float64), 1e-300)
    accuracy = np.stack(
        [(base.radius(alpha, theorem)[:, None] >= radius).mean(axis=0) for base, alpha in mixtures]
    )
    return accuracy.max(axis=0), accuracy.argmax(axis=0).tolist()
