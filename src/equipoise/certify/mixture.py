"""The smoothed classifier h inside a mixture (1 − alpha)·g + alpha·h, where nothing is known about g."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise import checks
from equipoise.certify import bounds, radii
from equipoise.certify.bounds import Floats
from equipoise.certify.certificate import ABSTAIN, Certificate

Ints = NDArray[np.int64]


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

    def radius(self, alpha: float, *, paper: bool = False) -> Floats:
        """(N,) certified radius of the mixture; zero where h's class is wrong."""
        found = radii.paper(self.lower, 1 - self.lower, self.sigma, alpha) if paper else radii.one_sided(
            self.lower, self.sigma, alpha)
        return np.where(self.chosen == self.labels, found, 0.0)


def clean_accuracy(base: Base, alpha: float) -> float:
    """Accuracy of the mixture on clean images: an estimate, from estimated probabilities of h."""
    answers = np.where(base.gap < radii.lemma_margin(alpha), base.accurate, base.chosen)
    return float((answers == base.labels).mean())


def alpha_for(base: Base, accuracy: float) -> float:
    """The largest alpha in [1/2, 1] with which the mixture's clean accuracy is at least `accuracy`.

    The accuracy only changes where the margin of h over g's class equals (1 − alpha)/alpha, so that every
    candidate is known; alpha should be chosen on images that are not evaluated afterwards.
    """
    checks.within("accuracy", accuracy, 0, 1)
    # Just above a margin g has won that image; the last bits go to g.
    steps = np.unique(np.concatenate([[0.0], base.gap[(base.gap >= 0) & (base.gap < 1)]]))
    best = 0.0
    for step in steps:
        alpha = 1.0 if step == 0 and clean_accuracy(base, 1.0) >= accuracy else 1 / (1 + step + 1e-9)
        if (reached := clean_accuracy(base, alpha)) >= accuracy:
            return alpha
        best = max(best, reached)
    raise checks.InputError(f"`accuracy` must be reachable with alpha in [0.5, 1], at most {best:g}, got {accuracy:g}")


def frontier(bases: Sequence[Base], reach: ArrayLike, accuracy: float) -> tuple[Floats, list[tuple[float, float]]]:
    """Certified accuracy at every radius of the best pair of alpha and sigma with one clean accuracy.

    Each base gets the alpha that :func:`alpha_for` finds (bases that cannot reach the accuracy are left
    out); per radius the best base counts [Bai2024, Figures 6 and 7].

    Returns:
        (R,) certified accuracy and the (alpha, sigma) of each radius.
    """
    wanted = np.asarray(reach, dtype=np.float64)
    curves, pairs = [], []
    for base in bases:
        try:
            alpha = alpha_for(base, accuracy)
        except checks.InputError:
            continue
        curves.append((base.radius(alpha)[:, None] >= np.maximum(wanted, 1e-300)).mean(axis=0))
        pairs.append((alpha, base.sigma))
    checks.require(bool(curves), "accuracy", "be reachable by at least one base", accuracy)
    table = np.stack(curves)
    return table.max(axis=0), [pairs[i] for i in table.argmax(axis=0)]


def gap_of(found: Certificate, accurate: Tensor) -> Tensor:
    """(B,) how far h puts its class above g's class: estimated, not bounded."""
    own = found.shares.gather(1, found.chosen.unsqueeze(1))
    return (own - found.shares.gather(1, accurate.unsqueeze(1))).squeeze(1)
