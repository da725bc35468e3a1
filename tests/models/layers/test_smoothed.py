"""A randomly smoothed classifier: its probabilities, its noise, its gradients and its
references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.core.checks import InputError
from equipoise.models import (
    RandomlySmoothedClassifier,
    TTAClassifier,
    checkpoint,
    relocate,
    runs_code,
)
from equipoise.models.layers.smoothed import CHUNK

X = torch.rand(5, 1, 3, 4, generator=torch.Generator().manual_seed(0))


class Pixels(nn.Module):
    """Every pixel is a logit, which shows the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x.flatten(1)


class Squares(Pixels):
    """Squared pixels, whose gradient needs the images again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class Score(nn.Module):
    """Two classes with logits ±s/2 for the first pixel s."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0, 0, 0] / 2, -x[:, 0, 0, 0] / 2], dim=1)


def test_probabilities_are_the_mean_over_noisy_copies() -> None:
    model = RandomlySmoothedClassifier(Pixels(), 0.5, 7, seed=3)
    noise = model._fixed_noise(X)
    assert noise.shape == (7, 1, 3, 4)
    expected = torch.stack([(X + 0.5 * z).flatten(1).softmax(dim=1) for z in noise]).mean(dim=0)
    torch.testing.assert_close(model(X).exp(), expected)
    torch.testing.assert_close(model(X).exp().sum(dim=1), torch.ones(5))


@pytest.mark.parametrize("sigma", [0.25, 2.0])
def test_the_mean_probability_of_a_logistic_score(sigma: float) -> None:
    """E sigmoid(s + σz) by Gauss-Hermite quadrature; the standard error is at most 0.5/√N."""
    model = RandomlySmoothedClassifier(Score(), sigma, 1000)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    s = X[:, 0, 0, 0].double().numpy()[:, None]
    expected = (1 / (1 + np.exp(-s - sigma * nodes)) @ weights) / weights.sum()
    np.testing.assert_allclose(model(X).exp()[:, 0].numpy(), expected, atol=4 * 0.5 / 1000**0.5)


def test_noise_depends_on_seed_and_sample_alone() -> None:
    model = RandomlySmoothedClassifier(Pixels(), 1.0, 9)
    assert torch.equal(model(X), model(X))
    assert torch.equal(torch.cat([model(x.unsqueeze(0)) for x in X]), model(X)), (
        "the same in any batch"
    )
    noise = model._fixed_noise(X)
    fewer = RandomlySmoothedClassifier(Pixels(), 2.0, 4)._fixed_noise(X)
    assert torch.equal(noise[:4], fewer) and len(noise.unique()) == noise.numel()
    assert not torch.equal(RandomlySmoothedClassifier(Pixels(), 1.0, 9, seed=1)(X), model(X))
    assert model(X.double()).dtype == torch.float64 and model(X[:, :, :2]).shape == (5, 8), (
        "other images, other noise"
    )


def test_fresh_noise_is_new_in_every_pass_and_for_every_image() -> None:
    model = RandomlySmoothedClassifier(Pixels(), 1.0, 3, fresh=True)
    assert not torch.equal(model(X), model(X))
    same = model(X[:1].expand(5, 1, 3, 4))
    assert len({tuple(row) for row in same.tolist()}) == 5


def test_gradients_are_those_of_one_graph_and_samples_go_in_chunks() -> None:
    base = Squares()
    model, x = RandomlySmoothedClassifier(base, 0.5, 2 * CHUNK + 1), X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 2].sum(), x)
    copies = (x + 0.5 * model._fixed_noise(X).unsqueeze(1)).flatten(2).square().softmax(dim=2)
    (expected,) = torch.autograd.grad(copies.mean(dim=0)[:, 2].log().sum(), x)
    torch.testing.assert_close(gradient, expected)
    assert max(base.sizes) == CHUNK * len(X) and len(base.sizes) == 2 * 3, (
        "each chunk again in the backward pass"
    )


def test_identity_and_weights() -> None:
    model = RandomlySmoothedClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 0.5, 8, seed=4
    )
    before = models.identity(model)
    model(X)
    assert models.identity(model) == before, "the noise is no weight"
    assert before["settings"]["(root)"] == {
        "type": "smoothed",
        "version": 1,
        "sigma": 0.5,
        "samples": 8,
        "seed": 4,
        "fresh": False,
    }


def test_references(tmp_path: Path) -> None:
    base = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8))
    checkpoint.save(tmp_path / "h.safetensors", base, {})
    model = models.load(f"smoothed:1/4:{tmp_path / 'h.safetensors'}", seed=5)
    assert isinstance(model, RandomlySmoothedClassifier) and not model.training
    assert (model.sigma, model.samples, model.seed, model.fresh) == (0.25, 100, 5, False)
    fresh = models.load(f"smoothed:0.5,7,fresh:tta:2:file:{tmp_path / 'h.safetensors'}")
    assert isinstance(fresh, RandomlySmoothedClassifier) and isinstance(fresh.model, TTAClassifier)
    assert (fresh.samples, fresh.fresh) == (7, True) and fresh(torch.rand(2, 3, 8, 8)).shape == (
        2,
        4,
    )
    outer = models.load(f"tta:2:smoothed:1:file:{tmp_path / 'h.safetensors'}")
    assert isinstance(outer, TTAClassifier) and isinstance(outer.model, RandomlySmoothedClassifier)
    assert (
        relocate("smoothed:1/4,9:tta:2:file:a.pt", "/m/{}".format)
        == "smoothed:1/4,9:tta:2:file:/m/a.pt"
    )
    assert runs_code("smoothed:1:python:m:f") and not runs_code("smoothed:1:tta:2:zoo:resnet8")


@pytest.mark.parametrize(
    ("text", "must"),
    [
        ("smoothed:0.5", "read smoothed:SIGMA:REFERENCE"),
        ("smoothed::zoo:cnn", "read smoothed:SIGMA:REFERENCE"),
        ("smoothed:zoo:cnn", "read smoothed:SIGMA:REFERENCE"),
        ("smoothed:1,2,3:zoo:cnn", "read smoothed:SIGMA:REFERENCE"),
        ("smoothed:1,2,fresh,1:zoo:cnn", "read smoothed"),
        ("smoothed:-1:zoo:cnn", "read smoothed"),
        ("smoothed:0:zoo:cnn", "`sigma` must be positive"),
        ("smoothed:1x:zoo:cnn", "`sigma` must be a number"),
        ("smoothed:1e999:zoo:cnn", "`sigma` must be finite"),
        ("smoothed:1,0:zoo:cnn", "`samples` must be"),
        ("smoothed:1,999999999:zoo:cnn", "`samples` must be at most"),
        ("smoothed:1:tta:2:smoothed:1:zoo:cnn", "have smoothed: only once"),
        ("smoothed:1:nowhere", "`model` must be"),
    ],
)
def test_unusable_references_are_one_sentence(text: str, must: str) -> None:
    with pytest.raises(InputError, match=must):
        models.load(text, num_classes=4, image_shape=(3, 8, 8))


def test_a_first_call_in_inference_mode_leaves_gradients_possible() -> None:
    model = RandomlySmoothedClassifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 0.25, 5)
    with torch.inference_mode():
        expected = model(X)
    x = X.clone().requires_grad_()
    logits = model(x)
    logits.sum().backward()
    assert x.grad is not None and torch.equal(logits, expected.clone())
