"""Surrogates of a mixture: their formulas and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from gate_pairs import gated, images
from lookup_models import lookup_pair, numbered_images
from torch import nn

from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.mixing.logit_maps import one_hot
from equipoise.mixing.surrogates import SLACK, TOWARDS_TARGET, Sides, hinge_sums, working_scale


def test_the_surrogate_is_equation_8() -> None:
    g, h = lookup_pair(1, 3.0)
    logit_map = LogitMap(1.3, 2.0, -0.5)
    mixture = MixedClassifier(g, h, 0.99, logit_map=logit_map, hard=True, surrogate_alpha=0.7)
    x = numbered_images(40)
    expected = 0.3 * g(x).softmax(1) + 0.7 * (
        0.9 * h(x).softmax(1) + 0.1 * logit_map(h(x)).softmax(1)
    )
    torch.testing.assert_close(mixture.surrogate()(x).exp(), expected)
    assert not mixture.differentiable and MixedClassifier(g, h, 0.5).differentiable


def _linear(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(105, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 105, generator=generator))
    return nn.Sequential(nn.Flatten(), layer)


def test_surrogates_have_gradients_where_the_mixture_has_none() -> None:
    mixture = MixedClassifier(
        _linear(1), _linear(2), 0.9, logit_map=LogitMap(5.0, 4.0, -1.1, "relu"), hard=True
    )
    x = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = mixture(x).argmax(1)
    switch = MixedClassifier(
        mixture.accurate,
        mixture.robust,
        0.6,
        logit_map=LogitMap(1.0, 1.0, 0.0, rivals=0.0),
        hard=True,
    )
    for source in (mixture.surrogate(), mixture.hinges(), switch.surrogate(), switch.hinges()):
        loss = nn.functional.cross_entropy(source(x), y, reduction="sum")
        gradient = torch.autograd.grad(loss, x)[0]
        assert bool((gradient.abs().amax((1, 2, 3)) > 0).all())


def test_hinges_are_zero_where_the_accurate_side_decides() -> None:
    g, h = lookup_pair(4, 3.0)
    mixture = MixedClassifier(g, h, 0.8, logit_map=LogitMap(1.0, 2.0, -0.5), hard=True)
    x = numbered_images(40)
    predicted = g(x).argmax(1)
    p = mixture.map_robust(h(x)).exp()
    decides = p.amax(1) - p.gather(1, predicted.unsqueeze(1)).squeeze(1) <= mixture.q
    scores = mixture.hinges()(x).gather(1, predicted.unsqueeze(1)).squeeze(1)
    assert bool(decides.any()) and bool((~decides).any())
    assert torch.equal(scores == 0, decides)


@pytest.mark.parametrize("rivals", [0.0, 1.0])
def test_the_tempered_surrogate_is_a_softmax_at_the_temperature_of_the_map(rivals: float) -> None:
    """A linear map with scale 3 and unit 2 works at T = 2/3 of the logits' own."""
    g, h = lookup_pair(1, 3.0)
    logit_map = LogitMap(3.0, 1.0, 0.0, "linear", rivals=rivals, unit=2.0)
    mixture = MixedClassifier(g, h, 0.7, logit_map=logit_map, hard=True)
    x = numbered_images(40)
    expected = 0.3 * g(x).softmax(1) + 0.7 * (
        0.9 * (1.5 * h(x)).softmax(1) + 0.1 * logit_map(h(x)).softmax(1)
    )
    torch.testing.assert_close(mixture.tempered_surrogate()(x).exp(), expected)


@pytest.mark.parametrize(
    "logit_map", [LogitMap(5.2, 0.57, -0.6, rivals=0.0, unit=1.8), LogitMap(4.95, 2.1, -0.03)]
)
def test_at_the_threshold_scaled_logits_are_as_confident_as_the_map(logit_map: LogitMap) -> None:
    scale, q = working_scale(logit_map, 0.4, 10), 0.4
    others = 9 if logit_map.flattens_rivals else 1
    gap = math.log((1 + others * q) / (1 - q))
    top = torch.tensor([gap / scale], dtype=torch.float64)
    difference = logit_map.transform(top) - logit_map.transform(torch.zeros_like(top))
    assert float(difference) == pytest.approx(gap)


@pytest.mark.parametrize("form", ["mapped", "logits"])
@pytest.mark.parametrize("rivals", [0.0, 1.0])
def test_the_sum_of_hinges_is_zero_only_where_the_mixture_predicts_another_class(
    form: str, rivals: float
) -> None:
    g, h = lookup_pair(4, 3.0)
    mixture = MixedClassifier(
        g, h, 0.8, logit_map=LogitMap(1.0, 2.0, -0.5, rivals=rivals), hard=True
    )
    x = numbered_images(40)
    predicted, sides = mixture(x).argmax(1), Sides(mixture)(x)
    zeros = 0
    for label in range(6):
        y = torch.full((40,), label)
        sums = hinge_sums(sides, y, form, reserve=0.05, rivals=rivals)
        other = torch.arange(6) != label
        reached = (sums == 0) & other
        assert bool((predicted[reached.any(dim=1)] != label).all())
        p = mixture.map_robust(h(x)).exp()
        below = p[:, label : label + 1] - p <= mixture.q - SLACK
        by_accurate = one_hot(g(x).argmax(1), 6).isfinite() & below & other
        unique = g(x).topk(2, dim=1).values.diff(dim=1).abs().squeeze(1) > 0.05 * g(x).std(dim=1)
        assert torch.equal(reached[unique], by_accurate[unique])
        zeros += int(reached.sum())
    assert zeros > 20


@pytest.mark.parametrize("form", ["mapped", "logits"])
@pytest.mark.parametrize("rivals", [0.0, 0.5])
def test_hinges_tell_targets_apart_where_a_map_flattens_the_rivals(
    form: str, rivals: float
) -> None:
    g = torch.tensor([[4.0, 0.0, 0.0, 0.0]])
    h = torch.tensor([[3.0, 1.0, -1.0, -2.0]], requires_grad=True)
    log_p = torch.log_softmax(
        torch.tensor([[3.0, 0.0, 0.0, 0.0]]), dim=1
    )  # the rivals are flat, whatever h is
    sides = torch.cat([g, h, log_p, torch.tensor([[-2.0]])], dim=1)
    sums = hinge_sums(sides, torch.tensor([0]), form, reserve=0.05, rivals=rivals)
    flat = 1 - rivals if form == "mapped" else rivals / TOWARDS_TARGET + 1 - rivals
    difference = sums.detach()[0, 2] - sums.detach()[0, 1]
    assert float(difference) == pytest.approx(
        flat * TOWARDS_TARGET * 2 / float(h.detach().std()), rel=1e-5
    )
    first, second = (torch.autograd.grad(sums[0, j], h, retain_graph=True)[0][0] for j in (1, 2))
    assert first[1] < second[1] and second[2] < first[2], (
        "an attack raises the logit of its own target"
    )


def test_hinges_of_a_gate_have_its_gradient() -> None:
    model, x = gated(alpha_min=0.5, alpha_max=1.0), images()
    y = model(x).argmax(1)
    sums = hinge_sums(Sides(model)(x), y, "mapped", reserve=1.0)
    gradient = torch.autograd.grad(sums.sum(), model.network.fc.weight)[0]
    assert float(gradient.abs().sum()) > 0
