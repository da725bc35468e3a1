from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from closed_form import Bins, images, key_of, random_stream
from scipy.stats import binomtest
from torch import Tensor, nn

from equipoise.certification import (
    ABSTAIN,
    CERTIFICATES,
    Certificate,
    Sampler,
    SamplerOptions,
    SmoothingPlan,
    certify,
    noise,
    predict,
    randomized_smoothing,
)
from equipoise.core import rng
from equipoise.core.checks import InputError

THREE = Bins((0.1, 0.6, 0.9))
PLAN = SmoothingPlan(0.3, samples=300, n0=30, failure=0.01)


class Net(nn.Module):
    """A small convolutional classifier of 3 × 5 × 7 images, K = 6."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.conv(x)).mean(dim=(2, 3))) * 5
        return logits


def pictures() -> Tensor:
    return rng.stream(3, "pictures", torch.arange(4)).uniform(3, 5, 7)


def field_values(certificate: Certificate) -> list[Tensor]:
    return [getattr(certificate, field.name) for field in dataclasses.fields(Certificate)]


def votes_by_loop(
    model: nn.Module, x: Tensor, stream: rng.Stream, purpose: str, samples: int
) -> Tensor:
    """Votes by a plain loop over images and samples."""
    key, votes = key_of(stream.at(purpose)), torch.zeros(len(x), 6, dtype=torch.int64)
    for i in range(len(x)):
        for sample in range(samples):
            z = noise.gaussian(key, stream.index[i : i + 1], torch.tensor([sample]), x.shape[1:])
            votes[i, model(x[i : i + 1] + 0.3 * z).argmax()] += 1
    return votes


@torch.no_grad()
def test_certify_follows_cohens_procedure() -> None:
    model, x, stream = Net(), pictures(), random_stream(4)
    plan = SmoothingPlan(0.3, samples=40, n0=12, failure=0.05)
    certificate = certify(model, x, plan=plan, stream=stream, options=SamplerOptions(batch_size=7))
    top = votes_by_loop(model, x, stream, "select", 12).argmax(dim=1)
    votes = votes_by_loop(model, x, stream, "estimate", 40)
    assert torch.equal(certificate.top, top) and torch.equal(certificate.votes, votes.double())
    for i in range(4):
        low = binomtest(int(votes[i, top[i]]), 40).proportion_ci(0.9, "exact").low
        assert certificate.lower[i] == pytest.approx(low, abs=1e-9)
        assert (certificate.predicted[i] != ABSTAIN) == (low > 0.5)
        radius = 0.3 * torch.distributions.Normal(0, 1).icdf(torch.tensor(max(low, 0.5))).item()
        assert (
            certificate.radius[i] == pytest.approx(radius, abs=1e-6)
            and certificate.radius[i] <= radius + 1e-7
        )
    assert (certificate.samples == 52).all()


@pytest.mark.parametrize(
    "change", [{}, {"tolerance": 0.05}, {"certificate": "soft"}, {"two_sided": True}]
)
def test_batches_do_not_matter(change: dict[str, Any]) -> None:
    """Neither batches of samples nor batches of images; one pixel, so that rounding is the same."""
    x, stream, plan = images(9), random_stream(9), dataclasses.replace(PLAN, **change)
    one = field_values(
        certify(THREE, x, plan=plan, stream=stream, options=SamplerOptions(batch_size=64))
    )
    other = field_values(
        certify(THREE, x, plan=plan, stream=stream, options=SamplerOptions(batch_size=1000))
    )
    parts = [
        field_values(certify(THREE, x[rows], plan=plan, stream=stream[rows]))
        for rows in (slice(0, 4), slice(4, 9))
    ]
    joined = [torch.cat(values) for values in zip(*parts, strict=True)]
    # Sums of floats depend on their order in the last bits.
    tolerance = 1e-9 if plan.certificate == "soft" else 0.0
    assert all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(one, other, strict=True)
    )
    assert all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(one, joined, strict=True)
    )


def test_seed_matters() -> None:
    x = images(9)
    assert not torch.equal(
        certify(THREE, x, plan=PLAN, stream=random_stream(9)).votes,
        certify(THREE, x, plan=PLAN, stream=random_stream(9, seed=1)).votes,
    )


class RecordingSampler(Sampler):
    """Checks that every sample is drawn once, in order, and records how many were drawn for each
    purpose."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drawn = {
            purpose: torch.zeros(len(self.x), dtype=torch.int64)
            for purpose in ("select", "estimate")
        }
        self.purposes: list[str] = []

    def accumulate(self, purpose: str, start: Tensor, stop: Tensor, use: Any) -> None:
        assert torch.equal(start, self.drawn[purpose]) and (stop >= start).all()
        self.drawn[purpose] = stop.clone()
        self.purposes.append(purpose)
        super().accumulate(purpose, start, stop, use)


@pytest.mark.parametrize(
    "change",
    [{}, {"two_sided": True}, {"tolerance": 0.05}, {"decide_radius": 0.1}, {"certificate": "soft"}],
)
def test_no_sample_both_selects_and_bounds(change: dict[str, Any]) -> None:
    plan = dataclasses.replace(PLAN, **change)
    sampler = RecordingSampler(THREE, images(9), random_stream(9), plan)
    certificate = CERTIFICATES[plan.certificate](sampler, plan)
    assert torch.equal(sampler.drawn["estimate"], certificate.n)
    assert torch.equal(sampler.drawn["select"], certificate.samples - certificate.n)
    assert sampler.purposes == sorted(sampler.purposes, reverse=True), (
        "the class is selected before it is bounded"
    )


def test_state_is_unchanged() -> None:
    model, before = Net().train(), torch.get_rng_state()
    certify(model, pictures(), plan=SmoothingPlan(0.3, samples=20, n0=5), stream=random_stream(4))
    predict(model, pictures(), plan=SmoothingPlan(0.3, samples=20, n0=5), stream=random_stream(4))
    assert model.training and model.conv.training and model.conv.weight.requires_grad
    assert model.conv.weight.grad is None and torch.equal(before, torch.get_rng_state())


def test_predict_is_cohens() -> None:
    votes = np.array([[60, 40, 0], [90, 10, 0], [50, 50, 0], [0, 3, 97], [5, 0, 0]])
    expected = [
        int(v.argmax())
        if binomtest(int(np.sort(v)[-1]), int(np.sort(v)[-2:].sum())).pvalue <= 0.05
        else ABSTAIN
        for v in votes
    ]
    assert randomized_smoothing.predict_from_votes(votes.astype(float), 0.05).tolist() == expected
    assert expected[2] == ABSTAIN and expected[1] == 0


class Disagreeing(nn.Module):
    """Class 0 has most votes, each by a small margin; class 1 has few votes, each with
    certainty."""

    def forward(self, x: Tensor) -> Tensor:
        certain = x.flatten(1)[:, 0] > 0.6
        return torch.stack((torch.where(certain, -50.0, 0.02), torch.zeros(len(x))), dim=1)


@pytest.mark.parametrize(("certificate", "expected"), [("votes", 0), ("soft", 1)])
def test_predict_agrees_with_the_certificate_of_the_plan(certificate: str, expected: int) -> None:
    """Votes and mean probabilities are two different smoothed classifiers."""
    plan = SmoothingPlan(0.3, samples=3000, n0=50, failure=0.01, certificate=certificate)
    x = torch.full((3, 1, 2, 2), 0.5)
    assert (
        certify(Disagreeing(), x, plan=plan, stream=random_stream(3)).predicted.tolist()
        == [expected] * 3
    )
    assert (
        predict(Disagreeing(), x, plan=plan, stream=random_stream(3, 1)).tolist() == [expected] * 3
    )


def test_predict_for_a_mixture_needs_its_accurate_side() -> None:
    x = torch.full((3, 1, 2, 2), 0.5)
    with pytest.raises(InputError, match="`accurate` must be given where alpha is below 1"):
        predict(
            Disagreeing(),
            x,
            plan=SmoothingPlan(0.3, samples=300, n0=50, alpha=0.8),
            stream=random_stream(3),
        )


def test_a_registered_certificate_is_used_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant_radius(sampler: Sampler, plan: SmoothingPlan) -> Certificate:
        n = torch.full((len(sampler.x),), plan.samples)
        votes = sampler.votes("estimate", torch.zeros_like(n), n).double()
        return Certificate.of(
            top=votes.argmax(dim=1),
            radius=torch.full((len(n),), 0.25),
            lower=votes.amax(dim=1) / n,
            votes=votes,
            n=n,
            selection_samples=0,
            failure=plan.failure,
        )

    monkeypatch.setitem(CERTIFICATES.builtin, "constant", constant_radius)
    plan = dataclasses.replace(PLAN, certificate="constant")
    assert (
        certify(THREE, images(3), plan=plan, stream=random_stream(3)).radius.tolist() == [0.25] * 3
    )
    assert predict(THREE, images(3), plan=plan, stream=random_stream(3)).shape == (3,)


def test_an_unknown_certificate_is_one_sentence() -> None:
    message = r"`certificate` must be one of soft, votes, got 'vote' \(did you mean 'votes'\?\)"
    with pytest.raises(InputError, match=message):
        certify(
            THREE,
            images(3),
            plan=dataclasses.replace(PLAN, certificate="vote"),
            stream=random_stream(3),
        )


def test_bad_images_and_streams() -> None:
    with pytest.raises(InputError, match=r"`images` must lie in \[0, 1\]"):
        certify(THREE, images(3) + 1, plan=PLAN, stream=random_stream(3))
    with pytest.raises(InputError, match="`stream` must have one index per image"):
        certify(THREE, images(3), plan=PLAN, stream=random_stream(2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_a_softmax_are_refused(value: float) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.flatten(1)[:, :1] > 1, value, 1.0).expand(-1, 2)

    with pytest.raises(InputError, match="`logits of the model Broken` must not contain NaN"):
        certify(Broken(), images(3), plan=PLAN, stream=random_stream(3))
