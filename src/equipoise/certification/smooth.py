"""Randomized smoothing [Cohen2019]: CERTIFY and PREDICT for many images at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import betainc
from torch import Tensor, nn

from equipoise.certification import mixture, sequential, soft
from equipoise.certification.bounds import Floats
from equipoise.certification.certificate import ABSTAIN, Certificate, made
from equipoise.certification.plan import SmoothingPlan
from equipoise.certification.radii import Rule
from equipoise.certification.sampler import Engine, Sampler
from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.core.rng import Stream


@torch.no_grad()
def certify(model: nn.Module, x: Tensor, *, plan: SmoothingPlan, stream: Stream, engine: Engine | None = None) -> Certificate:
    """The class of the smoothed classifier at every image, and the ℓ2 radius within which it cannot change.

    CERTIFY of [Cohen2019]: `n0` samples choose a class, `samples` others bound its probability from below
    with an exact bound, which a radius follows from; where the bound is too low it abstains. With alpha
    below 1 the certificate is that of the mixture of the smoothed classifier with any other (its class is
    still that of the smoothed one). A plan with a tolerance or a radius to decide stops as early as it can.

    Args:
        model: base classifier, images (B, C, H, W) → logits (B, K); it sees noisy images outside [0, 1].
        x: (B, C, H, W) images in [0, 1].
        plan: noise, samples, failure probability, stopping.
        stream: the chance of these images.
        engine: batch size, compilation, progress.

    Returns:
        Certificates; each is wrong with probability at most `plan.failure`.
    """
    with inference(model):
        sampler = Sampler(model, x, stream, plan, engine or Engine())
        if plan.soft:
            return soft.certify(sampler, plan)
        rule = Rule.of(plan, sampler.slack)
        goal = sequential.goal_of(plan, rule)
        return _plain(sampler, plan, rule) if goal is None else sequential.certify(sampler, plan, rule, goal)


def _plain(sampler: Sampler, plan: SmoothingPlan, rule: Rule) -> Certificate:
    zero = torch.zeros(len(sampler.x), dtype=torch.int64)
    chosen = sampler.votes("select", zero, zero + plan.n0).argmax(dim=1)
    n = zero + plan.samples
    votes = sampler.votes("estimate", zero, n).double()
    lower, reach = rule(votes.numpy(), n.double().numpy(), chosen.numpy(), plan.failure)
    predicted, radius = made(chosen, torch.from_numpy(reach))
    return Certificate(predicted, radius, torch.from_numpy(lower), chosen, n + plan.n0, votes, n,
                       torch.full((len(n),), plan.failure, dtype=torch.float64))


@torch.no_grad()
def predict(
    model: nn.Module, x: Tensor, *, plan: SmoothingPlan, stream: Stream, engine: Engine | None = None,
    accurate: nn.Module | None = None,
) -> Tensor:
    """(B,) class of the smoothed classifier, or ABSTAIN; wrong with probability at most `plan.failure`.

    PREDICT of [Cohen2019] over `plan.samples` votes, without a radius, so that few samples go far. With an
    `accurate` classifier and `plan.alpha` below 1 it is the class of the mixture
    (1 − alpha)·onehot(accurate) + alpha·smoothed. Means of probabilities (`plan.soft`) have no test of their own:
    there an answer is a class whose bound outweighs all others and any accurate classifier.
    """
    with inference(model, accurate):
        sampler = Sampler(model, x, stream, plan, engine or Engine())
        if plan.soft:
            return soft.certify(sampler, replace(plan, tolerance=None, decide_radius=None)).predicted
        zero = torch.zeros(len(x), dtype=torch.int64)
        n = zero + plan.samples
        checks.require(accurate is not None or plan.alpha == 1, "accurate",
                       f"be given where alpha is below 1 (it is {plan.alpha:g})", accurate)
        if accurate is None or plan.alpha == 1:
            return torch.from_numpy(decide(sampler.votes("predict", zero, n).numpy(), plan.failure))
        chosen = sampler.votes("select", zero, zero + plan.n0).argmax(dim=1)
        votes = sampler.votes("predict", zero, n).double().numpy()
        return torch.from_numpy(mixture.answer(votes, n.double().numpy(), chosen.numpy(),
                                               accurate(x).argmax(dim=1).cpu().numpy(), plan.alpha, plan.failure))


def decide(votes: Floats, failure: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """(B, K) votes → (B,) the most voted class where a two-sided binomial test of the top two says so, else ABSTAIN.

    The test may use the votes that named the two classes [Hung2019].
    """
    order = np.argsort(-votes, axis=1, kind="stable")
    rows = np.arange(len(votes))
    first, second = votes[rows, order[:, 0]].astype(float), votes[rows, order[:, 1]].astype(float)
    # P(Bin(first + second, 1/2) ≥ first), doubled.
    level = np.minimum(2 * betainc(first, second + 1, 0.5), 1.0)
    return np.where(level <= failure, order[:, 0], ABSTAIN)
