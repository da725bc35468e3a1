"""Randomized smoothing [Cohen2019]: CERTIFY and PREDICT for many images at once, and the registry
of certificates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import betainc
from torch import Tensor, nn

from equipoise.certification import mixture
from equipoise.certification.certificate import ABSTAIN, Certificate, SmoothingPlan
from equipoise.certification.radii import Floats, Ints, VoteRule
from equipoise.certification.sampler import Sampler, SamplerOptions
from equipoise.certification.sequential import certify_in_stages, stopping_rule
from equipoise.certification.soft import certify_mean_probabilities
from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.core.registry import Registry
from equipoise.core.rng import Stream


@torch.no_grad()
def certify(
    model: nn.Module,
    x: Tensor,
    *,
    plan: SmoothingPlan,
    stream: Stream,
    options: SamplerOptions | None = None,
) -> Certificate:
    """Certify the class of the smoothed classifier at every image, with the ℓ2 radius within which
    it is constant.

    CERTIFY of [Cohen2019]: `n0` samples select a class, `samples` others bound its probability from
    below with an exact bound, which gives a radius; where the bound is too low it abstains. With
    alpha below 1 the certificate is that of the mixture of the smoothed classifier with any other
    (its class is still that of the smoothed one). A plan with a tolerance or a radius to decide
    stops as early as it can.

    Args:
        model: base classifier, images (B, C, H, W) → logits (B, K); its inputs are noisy images
            outside [0, 1].
        x: (B, C, H, W) images in [0, 1].
        plan: noise, samples, failure probability, stopping, and which of :data:`CERTIFICATES`.
        stream: random stream of these images.
        options: batch size, compilation, progress.
    """
    with inference(model):
        return CERTIFICATES.get_entry(plan.certificate)(
            Sampler(model, x, stream, plan, options), plan
        )


def certify_votes(sampler: Sampler, plan: SmoothingPlan) -> Certificate:
    """Certificates from the votes of noisy copies, with exact binomial bounds."""
    rule = VoteRule(plan, sampler.probability_error)
    stopping = stopping_rule(rule)
    if stopping is not None:
        return certify_in_stages(sampler, rule, stopping)
    zero = torch.zeros(len(sampler.x), dtype=torch.int64)
    top = sampler.votes("select", zero, zero + plan.n0).argmax(dim=1)
    n = zero + plan.samples
    votes = sampler.votes("estimate", zero, n).double()
    bounds = rule.bounds(
        votes.numpy(), n.double().numpy(), top.numpy(), plan.failure, sampler.uniforms()
    )
    return Certificate.of(
        top=top,
        radius=torch.from_numpy(rule.radius(bounds)),
        lower=torch.from_numpy(bounds.lower),
        upper=torch.from_numpy(bounds.upper),
        votes=votes,
        n=n,
        selection_samples=plan.n0,
        failure=plan.failure,
    )


CERTIFICATES: Registry[Callable[[Sampler, SmoothingPlan], Certificate]] = Registry(
    "equipoise.certificates",
    "certificate",
    {"votes": certify_votes, "soft": certify_mean_probabilities},
)


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Tensor,
    *,
    plan: SmoothingPlan,
    stream: Stream,
    options: SamplerOptions | None = None,
    accurate: nn.Module | None = None,
) -> Tensor:
    """(B,) class of the smoothed classifier, or ABSTAIN; wrong with probability at most
    `plan.failure`.

    PREDICT of [Cohen2019] over `plan.samples` votes, without a radius, so that few samples suffice.
    With an `accurate` classifier and `plan.alpha` below 1 it is the class of the mixture (1 −
    alpha)·onehot(accurate) + alpha·smoothed. Only votes have such a test; with any other
    certificate this is its certified class.
    """
    with inference(model, accurate):
        sampler = Sampler(model, x, stream, plan, options)
        if plan.certificate != "votes":
            plan = replace(plan, tolerance=None, decide_radius=None)
            return CERTIFICATES.get_entry(plan.certificate)(sampler, plan).predicted
        checks.require(
            accurate is not None or plan.alpha == 1,
            "accurate",
            f"be given where alpha is below 1 (it is {plan.alpha:g})",
            accurate,
        )
        zero = torch.zeros(len(x), dtype=torch.int64)
        n = zero + plan.samples
        if accurate is None or plan.alpha == 1:
            return torch.from_numpy(
                predict_from_votes(sampler.votes("predict", zero, n).numpy(), plan.failure)
            )
        top = sampler.votes("select", zero, zero + plan.n0).argmax(dim=1)
        votes = sampler.votes("predict", zero, n).double().numpy()
        return torch.from_numpy(
            mixture.predict_from_votes(
                votes,
                n.double().numpy(),
                top.numpy(),
                accurate(x).argmax(dim=1).cpu().numpy(),
                plan.alpha,
                plan.failure,
            )
        )


def predict_from_votes(votes: Floats | Ints, failure: ArrayLike) -> Ints:
    """(B, K) votes → (B,) the top class where a two-sided binomial test of the top two is
    significant, else ABSTAIN.

    The test may use the votes that determined the two classes [Hung2019].
    """
    order = np.argsort(-votes, axis=1, kind="stable")
    rows = np.arange(len(votes))
    first, second = votes[rows, order[:, 0]].astype(float), votes[rows, order[:, 1]].astype(float)
    # P(Bin(first + second, 1/2) ≥ first), doubled.
    level = np.minimum(2 * betainc(first, second + 1, 0.5), 1.0)
    return np.where(level <= failure, order[:, 0], ABSTAIN)


def predict_from_certificate(
    certificate: Certificate, plan: SmoothingPlan, accurate: Tensor | None = None
) -> Tensor:
    """(B,) PREDICT from the votes of a certificate, or ABSTAIN; a certified class needs no further
    test.

    With the classes of an `accurate` classifier (B,) it is the class of the mixture.
    """
    if plan.certificate != "votes":
        return certificate.predicted
    votes, n, failure = (
        certificate.votes.numpy(),
        certificate.n.double().numpy(),
        certificate.failure.numpy(),
    )
    if accurate is None:
        classes = predict_from_votes(votes, failure)
    else:
        classes = mixture.predict_from_votes(
            votes, n, certificate.top.numpy(), accurate.numpy(), plan.alpha, failure
        )
    return torch.where(
        certificate.predicted != ABSTAIN, certificate.predicted, torch.from_numpy(classes)
    )
