from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from closed_form import Bins, chance, images
from scipy.stats import binomtest
from torch import Tensor, nn

from equipoise.certification import (
    ABSTAIN,
    Averaged,
    Certificate,
    Engine,
    SmoothingPlan,
    certify,
    joined,
    noise,
    predict,
    smooth,
)
from equipoise.certification.sampler import Sampler
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


def same(a: Certificate, b: Certificate) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Certificate))


def by_hand(model: nn.Module, x: Tensor, stream: rng.Stream, purpose: str, samples: int) -> Tensor:
    """Votes by a plain loop over images and samples."""
    key, votes = noise.key_of(stream.at(purpose)), torch.zeros(len(x), 6, dtype=torch.int64)
    for i in range(len(x)):
        for sample in range(samples):
            z = noise.gaussian(key, stream.index[i : i + 1], torch.tensor([sample]), x.shape[1:])
            votes[i, model(x[i : i + 1] + 0.3 * z).argmax()] += 1
    return votes


@torch.no_grad()
def test_cohens_procedure_step_by_step() -> None:
    model, x, stream = Net(), pictures(), chance(4)
    plan = SmoothingPlan(0.3, samples=40, n0=12, failure=0.05)
    found = certify(model, x, plan=plan, stream=stream, engine=Engine(batch_size=7))
    chosen = by_hand(model, x, stream, "select", 12).argmax(dim=1)
    votes = by_hand(model, x, stream, "estimate", 40)
    assert torch.equal(found.chosen, chosen) and torch.equal(found.votes, votes.double())
    for i in range(4):
        k = int(votes[i, chosen[i]])
        low = binomtest(k, 40).proportion_ci(0.9, "exact").low
        assert found.lower[i] == pytest.approx(low, abs=1e-9)
        assert (found.predicted[i] != ABSTAIN) == (low > 0.5)
        radius = 0.3 * torch.distributions.Normal(0, 1).icdf(torch.tensor(max(low, 0.5))).item()
        assert found.radius[i] == pytest.approx(radius, abs=1e-6) and found.radius[i] <= radius + 1e-7
    assert (found.samples == 52).all()


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, tolerance=0.05),
                                  dataclasses.replace(PLAN, soft=True), dataclasses.replace(PLAN, two_sided=True)])
def test_batches_do_not_matter(plan: SmoothingPlan) -> None:
    """Neither the batch of samples nor the company of images; one pixel, so that nothing is rounded otherwise."""
    x, stream = images(9), chance(9)
    one = certify(THREE, x, plan=plan, stream=stream, engine=Engine(batch_size=64))
    other = certify(THREE, x, plan=plan, stream=stream, engine=Engine(batch_size=1000))
    parts = joined([certify(THREE, x[rows], plan=plan, stream=stream[rows]) for rows in (slice(0, 4), slice(4, 9))])
    if plan.soft:  # sums of floats depend on their order in the last bits
        assert torch.equal(one.predicted, other.predicted) and torch.allclose(one.radius, other.radius, atol=1e-9)
        assert torch.equal(one.predicted, parts.predicted) and torch.allclose(one.radius, parts.radius, atol=1e-9)
    else:
        assert same(one, other) and same(one, parts)


def test_seed_matters() -> None:
    x = images(9)
    assert not torch.equal(certify(THREE, x, plan=PLAN, stream=chance(9)).votes,
                           certify(THREE, x, plan=PLAN, stream=chance(9, seed=1)).votes)


def test_choice_and_bound_use_different_samples() -> None:
    sampler = Sampler(THREE, images(50), chance(50), PLAN, Engine())
    zero = torch.zeros(50, dtype=torch.int64)
    assert not torch.equal(sampler.votes("select", zero, zero + 30), sampler.votes("estimate", zero, zero + 30))


@pytest.mark.parametrize("change", [{}, {"two_sided": True}, {"tolerance": 0.05}, {"decide_radius": 0.1},
                                    {"soft": True}])
def test_no_sample_both_chooses_and_bounds(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Whatever the plan: samples that choose are those before the bound, and each sample is drawn once."""
    drawn = {purpose: torch.zeros(9, dtype=torch.int64) for purpose in ("select", "estimate")}
    visit, order = Sampler.visit, []

    def watched(self: Sampler, purpose: str, start: Tensor, stop: Tensor, use: Any) -> None:
        assert torch.equal(start, drawn[purpose]) and (stop >= start).all()
        drawn[purpose] = stop.clone()
        order.append(purpose)
        visit(self, purpose, start, stop, use)

    monkeypatch.setattr(Sampler, "visit", watched)
    found = certify(THREE, images(9), plan=dataclasses.replace(PLAN, **change), stream=chance(9))
    assert torch.equal(drawn["estimate"], found.counted)
    assert torch.equal(drawn["select"], found.samples - found.counted)
    assert order == sorted(order, reverse=True), "all of the choice comes first"


def test_ranges_of_samples_add_up() -> None:
    sampler = Sampler(THREE, images(5), chance(5), PLAN, Engine(batch_size=13))
    start, stop = torch.tensor([0, 3, 7, 7, 20]), torch.tensor([5, 3, 40, 8, 90])
    middle = torch.tensor([2, 3, 30, 7, 21])
    both = sampler.votes("estimate", start, middle) + sampler.votes("estimate", middle, stop)
    assert torch.equal(both, sampler.votes("estimate", start, stop))
    assert torch.equal(both.sum(dim=1), stop - start)


def test_state_is_left_alone() -> None:
    model, before = Net().train(), torch.get_rng_state()
    certify(model, pictures(), plan=SmoothingPlan(0.3, samples=20, n0=5), stream=chance(4))
    predict(model, pictures(), plan=SmoothingPlan(0.3, samples=20, n0=5), stream=chance(4))
    assert model.training and model.conv.training and model.conv.weight.requires_grad
    assert model.conv.weight.grad is None and torch.equal(before, torch.get_rng_state())


def test_noise_is_standard_normal() -> None:
    index = torch.arange(2000)
    z = noise.gaussian(noise.key_of(chance(2000)), index, index % 7, torch.Size((3, 5, 7))).double().flatten()
    from scipy.stats import kstest

    assert kstest(z.numpy(), "norm").pvalue > 1e-3
    assert z.mean().abs() < 0.01 and abs(z.var() - 1) < 0.01
    pairs = z.view(2000, -1)
    assert torch.corrcoef(pairs[:, :40].T).fill_diagonal_(0).abs().max() < 0.12


def test_predict_is_cohens() -> None:
    votes = np.array([[60, 40, 0], [90, 10, 0], [50, 50, 0], [0, 3, 97], [5, 0, 0]])
    expected = [int(v.argmax()) if binomtest(int(np.sort(v)[-1]), int(np.sort(v)[-2:].sum())).pvalue <= 0.05
                else ABSTAIN for v in votes]
    assert smooth.decide(votes.astype(float), 0.05).tolist() == expected
    assert expected[2] == ABSTAIN and expected[1] == 0


class Torn(nn.Module):
    """Class 0 gets most votes, barely each; class 1 few, but each for sure."""

    def forward(self, x: Tensor) -> Tensor:
        surely = x.flatten(1)[:, 0] > 0.6
        return torch.stack((torch.where(surely, -50.0, 0.02), torch.zeros(len(x))), dim=1)


@pytest.mark.parametrize(("soft", "class_"), [(False, 0), (True, 1)])
def test_predict_answers_for_what_is_certified(soft: bool, class_: int) -> None:
    """Votes and mean probabilities are two smoothed classifiers; PREDICT must speak for the one of the plan."""
    plan = SmoothingPlan(0.3, samples=3000, n0=50, failure=0.01, soft=soft)
    x = torch.full((3, 1, 2, 2), 0.5)
    assert certify(Torn(), x, plan=plan, stream=chance(3)).predicted.tolist() == [class_] * 3
    assert predict(Torn(), x, plan=plan, stream=chance(3, 1)).tolist() == [class_] * 3


def test_predict_for_a_mixture_wants_its_accurate_side() -> None:
    x = torch.full((3, 1, 2, 2), 0.5)
    with pytest.raises(InputError, match="`accurate` must be given where alpha is below 1"):
        predict(Torn(), x, plan=SmoothingPlan(0.3, samples=300, n0=50, alpha=0.8), stream=chance(3))


def test_averaged_is_differentiable_and_fixed() -> None:
    model = Averaged(Net(), 0.3, (3, 5, 7), copies=5, seed=1)
    x = pictures().requires_grad_()
    log_p = model(x)
    assert torch.equal(log_p, model(x)) and torch.allclose(log_p.exp().sum(dim=1), torch.ones(4))
    assert torch.autograd.grad(log_p[:, 2].sum(), x)[0].abs().sum() > 0
    mean = torch.stack([torch.softmax(model.model(x + z), dim=1) for z in model.noise]).mean(dim=0)
    assert torch.allclose(log_p.exp(), mean, atol=1e-6)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"sigma": 0.0}, "`sigma` must be positive"), ({"sigma": -1.0}, "`sigma` must be positive"),
    ({"failure": 0.0}, "`failure` must lie in"), ({"failure": 1.0}, "`failure` must lie in"),
    ({"samples": 29}, "`samples` must be at least n0"), ({"n0": 0}, "`n0` must be"),
    ({"alpha": 0.49}, "`alpha` must lie in"), ({"alpha": 1.1}, "`alpha` must lie in"),
    ({"tolerance": 0.0}, "`tolerance` must be positive"), ({"decide_radius": -1.0}, "`decide_radius` must be"),
    ({"tolerance": 0.1, "decide_radius": 0.1}, "`decide_radius` must be left out"),
    ({"soft": True, "two_sided": True}, "`two_sided` must be left out"),
])
def test_bad_plans(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        dataclasses.replace(PLAN, **change)


def test_bad_images_and_models() -> None:
    with pytest.raises(InputError, match=r"`images` must lie in \[0, 1\]"):
        certify(THREE, images(3) + 1, plan=PLAN, stream=chance(3))
    with pytest.raises(InputError, match="`stream` must have one index per image"):
        certify(THREE, images(3), plan=PLAN, stream=chance(2))

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.flatten(1)[:, :1] > 1, torch.nan, 1.0).expand(-1, 2)

    with pytest.raises(InputError, match="`logits` must not contain NaN"):
        certify(Broken(), images(3), plan=PLAN, stream=chance(3))
