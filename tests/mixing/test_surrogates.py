"""Surrogates of a mixture: their formulas and their gradients."""

from __future__ import annotations

import torch
from lookup_models import lookup_pair, numbered_images
from torch import nn

from equipoise.mixing import LogitMap, MixedClassifier


def test_the_surrogate_is_equation_8() -> None:
    g, h = lookup_pair(1, 3.0)
    logit_map = LogitMap(1.3, 2.0, -0.5)
    mixture = MixedClassifier(g, h, 0.99, logit_map=logit_map, hard=True, surrogate_alpha=0.7)
    x = numbered_images(40)
    expected = 0.3 * g(x).softmax(1) + 0.7 * (0.9 * h(x).softmax(1) + 0.1 * logit_map(h(x)).softmax(1))
    torch.testing.assert_close(mixture.surrogate()(x).exp(), expected)
    assert not mixture.differentiable and MixedClassifier(g, h, 0.5).differentiable


def _linear(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(105, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 105, generator=generator))
    return nn.Sequential(nn.Flatten(), layer)


def test_surrogates_have_gradients_where_the_mixture_has_none() -> None:
    mixture = MixedClassifier(_linear(1), _linear(2), 0.9, logit_map=LogitMap(5.0, 4.0, -1.1, "relu"), hard=True)
    x = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = mixture(x).argmax(1)
    switch = MixedClassifier(mixture.accurate, mixture.robust, 0.6, logit_map=LogitMap(1.0, 1.0, 0.0, rivals=0.0),
                             hard=True)
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
