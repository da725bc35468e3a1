"""One contract over every attack, on unequal sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise import attacks
from equipoise.core import checks, geometry, losses
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import NORMS, Threat

Attack = Callable[..., Tensor]


def _smallest(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **more: Any) -> Tensor:
    return attacks.minimum_margin(model, x, y, threat=threat, stream=stream, steps=6, targets=2, **more).images[0]


ATTACKS: dict[str, Attack] = {
    "pgd": partial(attacks.pgd, steps=6, restarts=2),
    "apgd-ce": partial(attacks.apgd, steps=12, restarts=2),
    "apgd-dlr": partial(attacks.apgd, steps=12, loss="dlr"),
    "apgd-margin": partial(attacks.apgd, steps=12, loss="margin"),
    "targeted": partial(attacks.targeted, steps=12, targets=3),
    "targeted-distance": partial(attacks.targeted, steps=8, targets=2, order="distance"),
    "fab": partial(attacks.fab, steps=10, targets=3),
    "square": partial(attacks.square, queries=150),
    "fast": partial(attacks.auto_attack, version="fast"),
    "minimum_margin": _smallest,
}
GRADIENT_FREE = ("square",)
threats = [Threat("linf", 0.03), Threat("l2", 0.3)]


class Small(nn.Module):
    """Convolution, batch norm and dropout, so that modes matter and batch norms get folded."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5),
                                  nn.Flatten())
        self.head = nn.Linear(4 * 5 * 7, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def _images(count: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Stream]:
    chance = stream(3, "images", torch.arange(10, 10 + count))
    return chance.uniform(3, 5, 7).to(dtype), stream(0, "attack", chance.index)


def _setting() -> tuple[Small, Tensor, Tensor, Stream]:
    model = Small()
    x, chance = _images()
    with torch.no_grad():
        y = model.eval()(x).argmax(dim=1)
    y[3] = (y[3] + 1) % 6  # one image is wrong untouched
    model.train()
    model.body[3].eval()
    model.head.weight.requires_grad_(False)
    return model, x, y, chance


@pytest.mark.parametrize("threat", threats, ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_contract(name: str, threat: Threat) -> None:
    model, x, y, chance = _setting()
    marked = torch.ones_like(model.head.bias)
    model.head.bias.grad = marked.clone()
    modes = [sub.training for sub in model.modules()]
    learning = [p.requires_grad for p in model.parameters()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before, labels, state = x.clone(), y.clone(), torch.get_rng_state()

    x_adv = ATTACKS[name](model, x, y, threat=threat, stream=chance)

    assert torch.equal(torch.get_rng_state(), state), "global chance"
    assert [sub.training for sub in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == learning
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.head.bias.grad, marked)
    assert all(p.grad is None for p in model.parameters() if p is not model.head.bias)
    assert torch.equal(x, before) and torch.equal(y, labels)
    assert x_adv.shape == x.shape and x_adv.dtype == x.dtype and not x_adv.requires_grad
    assert x_adv.data_ptr() != x.data_ptr()
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    size = float(geometry.size(x_adv - x, threat.norm).max())
    assert size <= threat.eps * (1 if threat.norm == "linf" else 1 + 1e-6)
    again = ATTACKS[name](model, x, y, threat=threat, stream=chance)
    assert torch.equal(x_adv, again), "same seed, same bytes"
    watched = ATTACKS[name](model, x.clone().requires_grad_(), y, threat=threat, stream=chance)
    assert not watched.requires_grad and torch.equal(watched, again), "images with a gradient of their own"


@pytest.mark.parametrize("threat", threats, ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_never_worse_than_the_start(name: str, threat: Threat) -> None:
    model, x, y, chance = _setting()
    x_adv = ATTACKS[name](model, x, y, threat=threat, stream=chance)
    model.eval()
    with torch.no_grad():
        clean, attacked = (losses.probability_margin(model(z), y) for z in (x, x_adv))
    assert bool((attacked <= clean + 1e-6).all())
    assert bool((attacked[:3] < clean[:3] - 1e-4).any()), "and it gets somewhere"


@pytest.mark.parametrize("threat", [Threat("linf", 0.02), Threat("l2", 0.2)], ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_image_alone_and_in_company(name: str, threat: Threat, linear: Linear) -> None:
    x, chance = _images(5, torch.float64)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    together = ATTACKS[name](linear, x, y, threat=threat, stream=chance)
    for row in range(5):
        alone = ATTACKS[name](linear, x[row : row + 1], y[row : row + 1], threat=threat, stream=chance[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("name", ATTACKS)
def test_few_classes(name: str, classes: int) -> None:
    chance = generator(5)
    model = Linear(torch.randn(classes, 105, generator=chance), torch.zeros(classes))
    x, own = _images()
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    x_adv = ATTACKS[name](model, x, y, threat=Threat("linf", 0.2), stream=own)
    assert bool(x_adv.isfinite().all())
    with torch.no_grad():
        assert bool((model(x_adv).argmax(dim=1) != y).all()), "so large a ball holds other classes"


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in GRADIENT_FREE])
def test_gradients_come_from_the_surrogate(name: str, linear: Linear) -> None:
    """The judged model has no gradient at all; its twin shows the way."""
    x, chance = _images(4, torch.float64)
    hard = Hard(linear)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat("linf", 0.1)
    blind = ATTACKS[name](hard, x, y, threat=threat, stream=chance)
    seeing = ATTACKS[name](hard, x, y, threat=threat, stream=chance, surrogate=linear)
    with torch.no_grad():
        assert bool((hard(seeing).argmax(dim=1) != y).all())
        missed = hard(blind).argmax(dim=1) == y
    if name != "fast":  # which has an attack without gradients, and random starts
        assert bool(missed.any())


class Hard(nn.Module):
    """Log of a one-hot answer: right classes, no gradients, logits of −inf."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        z = self.base(x)
        return torch.zeros_like(z).scatter(1, z.argmax(dim=1, keepdim=True), 1).log()


def test_surrogate_loss_may_be_followed(linear: Linear) -> None:
    x, chance = _images(4, torch.float64)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat("linf", 0.1)
    x_adv = attacks.apgd(Hard(linear), x, y, threat=threat, stream=chance, surrogate=linear, follow="surrogate",
                         steps=20)
    with torch.no_grad():
        assert bool((linear(x_adv).argmax(dim=1) != y).all())


@pytest.mark.parametrize("name", ["pgd", "apgd-ce", "apgd-margin", "targeted"])
def test_extra_term_steers(name: str, linear: Linear) -> None:
    """A strong extra term decides the direction; brightness is raised as far as the ball allows."""
    x, chance = _images(4, torch.float64)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat("linf", 0.001)  # too small to fool, so the nearest iterate is what comes back
    seen: list[Tensor] = []

    def brightness(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return 1e6 * z.sum(dim=(1, 2, 3))

    ATTACKS[name](linear, x, y, threat=threat, stream=chance, extra=brightness)
    full = [z for z in seen if len(z) == len(x)]
    assert torch.allclose(full[-1], (x + threat.eps).clamp(max=1), atol=1e-6)


@pytest.mark.parametrize("name", ATTACKS)
def test_bad_input_is_one_sentence(name: str, linear: Linear) -> None:
    x, chance = _images(4, torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(checks.InputError):
        ATTACKS[name](linear, x + 1, y, threat=threats[0], stream=chance)
    with pytest.raises(checks.InputError):
        ATTACKS[name](linear, x, y + 6, threat=threats[0], stream=chance)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([name for name in ATTACKS if name != "fast"]), st.sampled_from(NORMS), st.floats(1e-3, 1),
       st.integers(0, 9))
def test_never_outside(name: str, norm: str, eps: float, seed: int) -> None:
    threat = Threat(norm, eps)
    model = Linear(torch.randn(6, 105, generator=generator(seed)), torch.randn(6, generator=generator(seed + 1)))
    x = stream(seed, "images", torch.arange(4)).uniform(3, 5, 7).round(decimals=1)  # some pixels at 0 and 1
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    x_adv = ATTACKS[name](model, x, y, threat=threat, stream=stream(seed, "attack", torch.arange(4)))
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    assert float(geometry.size(x_adv - x, norm).max()) <= threat.eps * (1 if norm == "linf" else 1 + 1e-6)
