"""Samples of early stopping on simulated votes, for `certify.py --simulated`.

Simulated votes are those of 4000 images with assumed class probabilities, about those of the
ResNet-18: certified accuracy falls from 67 % at radius 0 over 47 % at 0.5 to 4 % at 1.95. With
KEPT, rows of experiments/smoothmix/rows at sigma 0.5, they are those of its images, with the shares
of votes that the radii say.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import torch
from common import print_json
from scipy.special import betaincinv, ndtr
from torch import Tensor

from equipoise.certification import Certificate, SmoothingPlan
from equipoise.certification.radii import VoteRule
from equipoise.certification.randomized_smoothing import certify_votes

EARLY = {
    "tolerance 0.05": SmoothingPlan(0.5, tolerance=0.05),
    "tolerance 0.05, randomized": SmoothingPlan(0.5, tolerance=0.05, randomized=True),
    "tolerance 0.01": SmoothingPlan(0.5, tolerance=0.01),
    "tolerance 0.005": SmoothingPlan(0.5, tolerance=0.005),
    "decide radius 0.5": SmoothingPlan(0.5, decide_radius=0.5),
}


def measure(kept: Path | None) -> None:
    """Every way to stop early, and what a single check needs if the probabilities are known."""
    probabilities = assumed_probabilities() if kept is None else kept_probabilities(kept)
    simulated(*probabilities)
    known_probabilities(*probabilities)


class SimulatedVotes:
    """Votes for the first of two classes with known probabilities, in place of a sampler."""

    num_classes, probability_error = 2, 0.0

    def __init__(self, probability: np.ndarray, plan: SmoothingPlan, seed: int) -> None:
        self.x, self.probability, self.rng = (
            torch.zeros(len(probability)),
            probability,
            np.random.default_rng(seed),
        )
        self.uniform = self.rng.random(len(probability)) if plan.randomized else None

    def uniforms(self) -> np.ndarray | None:
        return self.uniform

    def votes(self, purpose: str, start: Tensor, stop: Tensor) -> Tensor:
        own = self.rng.binomial((stop - start).numpy(), self.probability)
        return torch.from_numpy(np.stack((own, (stop - start).numpy() - own), axis=1))


def assumed_probabilities(count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Probability of each image's first class, and whether that is the label."""
    rng = np.random.default_rng(3)
    shares, quantiles = (
        np.array([0, 0.04, 0.13, 0.28, 0.468, 0.67]) / 0.67,
        [5.5, 3.9, 3.0, 2.0, 1.0, 0.0],
    )
    correct = np.interp(rng.random(int(0.67 * count)), shares, quantiles)
    wrong = np.abs(rng.normal(0, 0.7, int(0.15 * count)))
    undecided = -np.abs(rng.normal(0, 0.3, count - len(correct) - len(wrong)))
    return ndtr(np.concatenate([correct, wrong, undecided])), np.arange(count) < len(correct)


def kept_probabilities(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Probability of each image's first class in kept certificates at sigma 0.5, and whether that
    is the label.

    The share of votes is the one whose lower bound gives the radius. Abstentions have an even
    share.
    """
    with gzip.open(path, "rt", newline="") as file:
        lines = list(csv.DictReader(file))
    radii = np.array([float(line["radius"]) for line in lines])
    lower = ndtr(radii / 0.5)
    n = np.array([min(int(line["samples"]), 100_000) for line in lines])
    low, high = n * lower, n.astype(float)
    for _ in range(40):  # bisection: the bound grows with the votes
        votes = (low + high) / 2
        below = betaincinv(votes, n - votes + 1, 0.001) < lower
        low, high = np.where(below, votes, low), np.where(below, high, votes)
    return (
        np.where(radii > 0, (high + 0.5) / (n + 1), 0.5),
        np.array([line["label"] == line["predicted"] for line in lines]),
    )


def simulated(p: np.ndarray, is_label: np.ndarray) -> None:
    def radii(plan: SmoothingPlan, seed: int) -> tuple[Certificate, np.ndarray]:
        certificate = certify_votes(SimulatedVotes(p, plan, seed), plan)  # type: ignore[arg-type]
        return certificate, np.where(
            is_label & (certificate.predicted.numpy() == 0), certificate.radius.numpy(), 0
        )

    full, full_radii = radii(SmoothingPlan(0.5), seed=1)
    for name, plan in EARLY.items():
        early, own = radii(plan, seed=0)
        lost = full_radii - own
        shown = (
            {}
            if plan.decide_radius is not None
            else {
                "acr_lost": lost.mean(),
                "standard_error": lost.std(ddof=1) / len(lost) ** 0.5,
                "acr_lost_percent": 100 * lost.sum() / full_radii.sum(),
                "lost_per_certified_image": lost[full_radii > 0].mean(),
                "lost_above_1.9": lost[full_radii > 1.9].mean(),
            }
        )
        print_json(
            what=f"simulated, {name}",
            samples=float(early.samples.double().mean()),
            samples_saved=float(full.samples.sum() / early.samples.sum()),
            **shown,
        )


def known_probabilities(
    p: np.ndarray, is_label: np.ndarray, tolerance: float = 0.05, draws: int = 40
) -> None:
    """Fewest samples that lose at most the tolerance on average, image by image, if probabilities
    were known.

    One check with the whole failure probability, and no samples to select the class or to predict
    the size.
    """
    rule, rng = VoteRule(SmoothingPlan(0.5)), np.random.default_rng(0)

    def mean_radius(n: int) -> np.ndarray:
        own = rng.binomial(n, p, (draws, len(p))).ravel()
        votes, total, top = (
            np.stack((own, n - own), axis=1).astype(float),
            np.full(len(own), float(n)),
            own * 0,
        )
        return (
            rule.radius(rule.bounds(votes, total, top, rule.plan.failure))
            .reshape(draws, -1)
            .mean(axis=0)
        )

    sizes = np.unique(np.rint(np.geomspace(50, rule.plan.samples, 100)).astype(int))
    lost = mean_radius(rule.plan.samples) - np.stack([mean_radius(int(n)) for n in sizes])
    first = (lost <= tolerance).argmax(axis=0)
    print_json(
        what=f"simulated, probabilities known, tolerance {tolerance}",
        samples=sizes[first].mean(),
        samples_saved=(rule.plan.samples + rule.plan.n0) / sizes[first].mean(),
        lost_per_certified_image=lost[first, np.arange(len(p))][is_label].mean(),
    )
