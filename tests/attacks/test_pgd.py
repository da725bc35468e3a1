from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_models import inner_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import Linear
from equipoise.attacks import Pgd, TransferPgd
from equipoise.core import geometry, losses
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import NORMS, Threat
from equipoise.mixing import MixedClassifier


def _stream(count: int, seed: int = 0) -> Stream:
    return stream(seed, "pgd", torch.arange(count))


def _inner(count: int) -> Tensor:
    return inner_images(count)[0]


@pytest.mark.parametrize("norm", NORMS)
def test_two_linear_classes_closed_form(norm: str) -> None:
    """With logits (0, w·x + b) the lowest margin in the ball is margin − eps·‖w‖ in the dual
    norm."""
    weight = torch.zeros(2, 105, dtype=torch.float64)
    weight[1] = torch.randn(105, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = _inner(64), torch.arange(64) % 2
    centre = (x.flatten(1) @ weight[1]).mean()
    model = Linear(weight, torch.stack([centre * 0, -centre]))
    eps = 0.05 if norm == "linf" else 0.3
    dual = geometry.dual_norm(weight[1:], norm)
    clean = losses.signed_margin(model(x), y)
    reached = losses.signed_margin(
        model(
            Pgd(steps=40, step_size=eps / 4)(
                model, x, y, threat=Threat(norm, eps), stream=_stream(64)
            )
        ),
        y,
    )
    # Images that are misclassified already are left as they are.
    expected = torch.where(clean < 0, clean, clean - eps * dual)
    torch.testing.assert_close(reached, expected.detach(), rtol=1e-3, atol=1e-3)
    assert bool((clean >= 0).any()) and bool((clean < 0).any())


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(NORMS), st.floats(0.01, 1), st.integers(1, 4), st.integers(0, 5))
def test_never_outside_and_never_worse_than_clean(
    norm: str, eps: float, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Linear(torch.randn(6, 105, generator=generator), torch.randn(6, generator=generator))
    x, y = torch.rand(4, 3, 5, 7, generator=generator), torch.randint(6, (4,), generator=generator)
    threat = Threat(norm, eps)
    x_adv = Pgd(steps=steps, restarts=2)(model, x, y, threat=threat, stream=_stream(4))
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    assert float(geometry.size(x_adv - x, norm).max()) <= eps * (1 if norm == "linf" else 1 + 1e-6)
    assert bool((losses.signed_margin(model(x_adv), y) <= losses.signed_margin(model(x), y)).all())


def test_slice_of_a_batch_is_a_batch_of_one(linear: Linear) -> None:
    x, y = _inner(5), torch.arange(5)
    threat = Threat("linf", 0.02)
    attack = Pgd(restarts=2)
    whole = attack(linear, x, y, threat=threat, stream=_stream(5))
    for i in range(5):
        one = attack(
            linear, x[i : i + 1], y[i : i + 1], threat=threat, stream=_stream(5)[i : i + 1]
        )
        torch.testing.assert_close(one[0], whole[i], rtol=0, atol=1e-12)


def test_leaves_no_traces() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(105), nn.Linear(105, 6)).double().train()
    x, y = _inner(4), torch.arange(4)
    kept, statistics = x.clone(), model[1].running_mean.clone()  # type: ignore[operator]
    before = torch.get_rng_state()
    with torch.no_grad():
        first = Pgd()(model, x, y, threat=Threat("l2", 0.3), stream=_stream(4))
    second = Pgd()(model, x, y, threat=Threat("l2", 0.3), stream=_stream(4))
    other = Pgd()(model, x, y, threat=Threat("l2", 0.3), stream=_stream(4, seed=1))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert not first.requires_grad and first.dtype == x.dtype and torch.equal(x, kept)
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(model[1].running_mean, statistics)  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_surrogate_gives_gradients_and_model_judges() -> None:
    """A linear surrogate leads to the same corner of the ball for any model; the model only
    decides."""
    generator = torch.Generator().manual_seed(4)
    weights = [
        torch.stack([0 * w, w])
        for w in torch.randn(2, 105, generator=generator, dtype=torch.float64)
    ]
    accurate, robust = (Linear(w, torch.zeros(2, dtype=torch.float64)) for w in weights)
    mixture = MixedClassifier(accurate, robust, 0.5)
    x = _inner(64)
    y = mixture(x).argmax(1)
    towards = (1 - 2 * y.double()).view(-1, 1, 1, 1)
    for source in (accurate, robust):
        corner = x + 0.01 * towards * source.weight[1].sign().view(3, 5, 7)
        lower = losses.signed_margin(mixture(corner), y) < losses.signed_margin(mixture(x), y)
        expected = torch.where(lower.view(-1, 1, 1, 1), corner, x)
        x_adv = Pgd(surrogate=source)(
            mixture, x, y, threat=Threat("linf", 0.01), stream=_stream(64)
        )
        torch.testing.assert_close(x_adv, expected.detach())
        assert bool(lower.any())


def test_extra_term_is_raised() -> None:
    """With a constant loss only the extra term moves the image: all pixels to the upper end of the
    ball."""
    x, points = _inner(3), []
    constant = Linear(
        torch.zeros(6, 105, dtype=torch.float64), torch.arange(6, dtype=torch.float64)
    )

    def brightness(images: Tensor) -> Tensor:
        points.append(images.detach())
        return images.flatten(1).sum(1)

    Pgd(steps=10, extra=brightness)(
        constant, x, torch.full((3,), 5), threat=Threat("linf", 0.01), stream=_stream(3)
    )
    torch.testing.assert_close(points[-1], x + 0.01)


def test_constant_model_gives_no_nan() -> None:
    model = Linear(torch.zeros(6, 105), torch.zeros(6))
    x = torch.full((2, 3, 5, 7), 0.5)
    for norm in NORMS:
        x_adv = Pgd()(
            model, x, torch.zeros(2, dtype=torch.long), threat=Threat(norm, 0.1), stream=_stream(2)
        )
        assert bool(x_adv.isfinite().all())


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"restarts": 0}, {"step_size": -0.1}, {"loss": "mse"}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Pgd(**bad)


def test_nan_logits_are_an_input_error() -> None:
    model = Linear(torch.full((6, 105), torch.nan), torch.zeros(6))
    with pytest.raises(InputError, match="not contain NaN"):
        Pgd()(
            model,
            _inner(2).float(),
            torch.zeros(2, dtype=torch.long),
            threat=Threat("l2", 0.1),
            stream=_stream(2),
        )


class NeverQueried(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model under attack was queried")


def test_transfer_moves_every_image_and_never_queries_the_model(linear: Linear) -> None:
    x = _inner(4)
    y = linear(x).argmax(dim=1)
    y[2:] = (y[2:] + 1) % 6  # misclassified already: moved all the same
    x_adv = TransferPgd(linear, steps=10)(
        NeverQueried(), x, y, threat=Threat("linf", 0.1), stream=_stream(4)
    )
    before, after = (losses.cross_entropy(linear(at), y) for at in (x, x_adv))
    assert bool((after > before).all())
    assert float((x_adv - x).abs().max()) <= 0.1 + 1e-6
