"""One contract over every attack, on images with unequal sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attack_models import HardDecision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise import attacks
from equipoise.attacks import Apgd, Fab, MinimumNorm, Pgd, Square, Suite, TargetedApgd
from equipoise.attacks.engine import Stage
from equipoise.core import checks, geometry, losses
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import NORMS, Threat


@dataclass(frozen=True)
class SmallestMargin(attacks.Attack):
    """The first point of `minimum_margin`, so that it meets the same contract."""

    def stages(self) -> tuple[Stage, ...]:
        return ()

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        threat: Threat,
        stream: Stream,
        precision: str = "auto",
    ) -> Tensor:
        suite = replace(
            attacks.margin_suite(steps=6, targets=2), surrogate=self.surrogate, extra=self.extra
        )
        return attacks.minimum_margin(
            model, x, y, threat=threat, stream=stream, attack=suite
        ).images[0]


ATTACKS: dict[str, attacks.Attack] = {
    "pgd": Pgd(steps=6, restarts=2),
    "apgd-ce": Apgd(steps=12, restarts=2),
    "apgd-dlr": Apgd(steps=12, loss="dlr"),
    "apgd-margin": Apgd(steps=12, loss="margin"),
    "targeted": TargetedApgd(steps=12, ranks=(1, 2, 3)),
    "targeted-distance": TargetedApgd(steps=8, ranks=(1, 2), order="distance"),
    "fab": Fab(steps=10, ranks=(1, 2, 3)),
    "square": Square(queries=150),
    "fast": attacks.fast(),
    "nested": Suite(
        (Pgd(steps=2), Suite((Apgd(steps=8), TargetedApgd(steps=8, ranks=(1,))), name="inner"))
    ),
    "minimum_margin": SmallestMargin(),
    "minimum-norm": MinimumNorm(steps=10, targets=2, restarts=3),
}
THREATS = [Threat("linf", 0.03), Threat("l2", 0.3), Threat("l1", 2)]
all_attacks: Callable[..., Any] = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
every_threat: Callable[..., Any] = pytest.mark.parametrize("threat", THREATS, ids=str)


class Small(nn.Module):
    """Convolution, batch norm and dropout, so that modes matter and batch norms get folded."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * 5 * 7, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def _images(count: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Stream]:
    numbers = stream(3, "images", torch.arange(10, 10 + count))
    return numbers.uniform(3, 5, 7).to(dtype), stream(0, "attack", numbers.index)


def _partly_training_model() -> tuple[Small, Tensor, Tensor, Stream]:
    model = Small()
    x, numbers = _images()
    with torch.no_grad():
        y = model.eval()(x).argmax(dim=1)
    y[3] = (y[3] + 1) % 6  # one image is misclassified clean
    model.train()
    model.body[3].eval()
    model.head.weight.requires_grad_(False)
    return model, x, y, numbers


@all_attacks
@every_threat
def test_result_is_inside_the_ball_and_reproducible(attack: attacks.Attack, threat: Threat) -> None:
    model, x, y, numbers = _partly_training_model()
    x_adv = attack(model, x, y, threat=threat, stream=numbers)
    assert x_adv.shape == x.shape and x_adv.dtype == x.dtype and not x_adv.requires_grad
    assert x_adv.data_ptr() != x.data_ptr()
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    size = float(geometry.size(x_adv.double() - x.double(), threat.norm).max())
    assert size <= threat.eps * (1 + 1e-6 if threat.norm == "l2" else 1)
    with_gradient = attack(model, x.clone().requires_grad_(), y, threat=threat, stream=numbers)
    assert not with_gradient.requires_grad and torch.equal(with_gradient, x_adv), (
        "same seed, same bytes"
    )


@all_attacks
@every_threat
def test_model_images_and_global_random_state_stay_as_they_are(
    attack: attacks.Attack, threat: Threat
) -> None:
    model, x, y, numbers = _partly_training_model()
    gradient = torch.ones_like(model.head.bias)
    model.head.bias.grad = gradient.clone()
    modes = [sub.training for sub in model.modules()]
    learning = [p.requires_grad for p in model.parameters()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before, labels, random_state = x.clone(), y.clone(), torch.get_rng_state()
    attack(model, x, y, threat=threat, stream=numbers)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [sub.training for sub in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == learning
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.head.bias.grad, gradient)
    assert all(p.grad is None for p in model.parameters() if p is not model.head.bias)
    assert torch.equal(x, before) and torch.equal(y, labels)


@all_attacks
@every_threat
def test_margin_is_never_larger_than_the_clean_one(attack: attacks.Attack, threat: Threat) -> None:
    model, x, y, numbers = _partly_training_model()
    x_adv = attack(model, x, y, threat=threat, stream=numbers)
    model.eval()
    with torch.no_grad():
        clean, attacked = (losses.probability_margin(model(z), y) for z in (x, x_adv))
    assert bool((attacked <= clean + 1e-6).all())
    assert bool((attacked[:3] < clean[:3] - 1e-4).any()), "and some are smaller"


@all_attacks
@pytest.mark.parametrize(
    "threat", [Threat("linf", 0.02), Threat("l2", 0.2), Threat("l1", 1.5)], ids=str
)
def test_an_image_gets_the_same_alone_and_in_a_batch(
    attack: attacks.Attack, threat: Threat, linear: Linear
) -> None:
    x, numbers = _images(5, torch.float64)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    together = attack(linear, x, y, threat=threat, stream=numbers)
    for row in range(5):
        part = slice(row, row + 1)
        alone = attack(linear, x[part], y[part], threat=threat, stream=numbers[part])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-9)


@all_attacks
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_few_classes(attack: attacks.Attack, classes: int) -> None:
    model = Linear(torch.randn(classes, 105, generator=generator(5)), torch.zeros(classes))
    x, numbers = _images()
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    x_adv = attack(model, x, y, threat=Threat("linf", 0.2), stream=numbers)
    assert bool(x_adv.isfinite().all())
    with torch.no_grad():
        assert bool((model(x_adv).argmax(dim=1) != y).all()), (
            "so large a ball contains other classes"
        )


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "square"])
def test_gradients_come_from_the_surrogate(name: str, linear: Linear) -> None:
    """The model under attack has no gradient at all; the surrogate has."""
    x, numbers = _images(4, torch.float64)
    hard, threat = HardDecision(linear), Threat("linf", 0.1)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    without = ATTACKS[name](hard, x, y, threat=threat, stream=numbers)
    with_surrogate = replace(ATTACKS[name], surrogate=linear)(
        hard, x, y, threat=threat, stream=numbers
    )
    with torch.no_grad():
        assert bool((hard(with_surrogate).argmax(dim=1) != y).all())
        survived = hard(without).argmax(dim=1) == y
    if name != "fast":  # which has an attack without gradients, and many random starts
        assert bool(survived.any())


@pytest.mark.parametrize("name", ["pgd", "apgd-ce", "apgd-margin", "targeted", "nested"])
def test_extra_term_is_raised(name: str, linear: Linear) -> None:
    """A strong extra term decides the direction: brightness is raised as far as the ball allows."""
    x, numbers = _images(4, torch.float64)
    with torch.no_grad():
        y = linear(x).argmax(dim=1)
    threat = Threat("linf", 0.001)  # too small to fool the model
    points: list[Tensor] = []

    def brightness(z: Tensor) -> Tensor:
        points.append(z.detach().clone())
        return 1e6 * z.sum(dim=(1, 2, 3))

    replace(ATTACKS[name], extra=brightness)(linear, x, y, threat=threat, stream=numbers)
    full = [z for z in points if len(z) == len(x)]
    assert torch.allclose(full[-1], (x + threat.eps).clamp(max=1), atol=1e-6)


@all_attacks
def test_bad_images_labels_and_streams_are_input_errors(
    attack: attacks.Attack, linear: Linear
) -> None:
    x, numbers = _images(4, torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(checks.InputError, match=r"lie in \[0, 1\]"):
        attack(linear, x + 1, y, threat=THREATS[0], stream=numbers)
    with pytest.raises(checks.InputError, match=r"`labels` must lie in 0..5"):
        attack(linear, x, y + 6, threat=THREATS[0], stream=numbers)
    with pytest.raises(checks.InputError, match="`stream` must be those of 4 images, got 3"):
        attack(linear, x, y, threat=THREATS[0], stream=numbers[:3])


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([name for name in ATTACKS if name != "fast"]),
    st.sampled_from(NORMS),
    st.floats(1e-3, 1),
    st.integers(0, 9),
)
def test_result_is_never_outside(name: str, norm: str, eps: float, seed: int) -> None:
    threat = Threat(norm, eps)
    model = Linear(
        torch.randn(6, 105, generator=generator(seed)),
        torch.randn(6, generator=generator(seed + 1)),
    )
    x = (
        stream(seed, "images", torch.arange(4)).uniform(3, 5, 7).round(decimals=1)
    )  # some pixels at 0 and 1
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    x_adv = ATTACKS[name](
        model, x, y, threat=threat, stream=stream(seed, "attack", torch.arange(4))
    )
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    assert float(geometry.size(x_adv - x, norm).max()) <= threat.eps * (
        1 if norm == "linf" else 1 + 1e-6
    )


@all_attacks
def test_settings_have_a_stable_description(attack: attacks.Attack) -> None:
    described = (
        attack.describe()
        if not isinstance(attack, SmallestMargin)
        else attacks.margin_suite().describe()
    )
    assert described["version"] == 1 and described["attack"]
