"""The gate and its mixture: formula, range, bases, gradients and attacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate_pairs import C, H, K, W, attack, gated, images, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.mixing import Gate, GatedClassifier, LogitMap, MixedClassifier, mix, new_gate
from equipoise.mixing.gated_surrogates import AlphaPenalty
from equipoise.models import build, feature_hooks


def test_the_formula_with_an_alpha_per_image() -> None:
    model, x = (
        gated(alpha_min=0.6, alpha_max=0.9, scale=3.0, shift=-0.2, logit_scales=(1.5, 0.5)),
        images(),
    )
    u = model.network(
        [
            feature_hooks.forward_with_features(base, layers, x)[1]
            for base, layers in zip(
                (model.accurate, model.robust), model.network.feature_layers, strict=True
            )
        ]
    )
    alpha = 0.6 + 0.3 * torch.sigmoid(3.0 * u - 0.2)
    assert alpha.max() - alpha.min() > 0.02
    p_g, p_h = (
        torch.softmax(1.5 * model.accurate(x), dim=1),
        torch.softmax(0.5 * model.robust(x), dim=1),
    )
    expected = (1 - alpha)[:, None] * p_g + alpha[:, None] * p_h
    torch.testing.assert_close(model(x).exp(), expected)
    torch.testing.assert_close(model.alphas(x), alpha)


def test_one_pass_of_each_base_and_of_the_gate() -> None:
    model, decides = gated(), {"accurate": 0, "robust": 0, "network": 0}
    for name in decides:
        getattr(model, name).register_forward_hook(
            lambda module, inputs, output, name=name: decides.__setitem__(name, decides[name] + 1)
        )
    model(images())
    assert decides == {"accurate": 1, "robust": 1, "network": 1}


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 0.99), st.floats(0.001, 1), st.floats(-40, 40))
def test_the_range_holds_and_is_exact(low: float, wide: float, z: float) -> None:
    model = _tiny(low, min(low + wide, 1.0))
    gate = model.restrict_gate(torch.tensor([z], dtype=torch.float64))
    alpha = low + (model.alpha_range[1] - low) * torch.sigmoid(
        torch.tensor([z], dtype=torch.float64)
    )
    torch.testing.assert_close(torch.sigmoid(gate), alpha, rtol=1e-6, atol=1e-12)
    assert bool(gate.isfinite().all())


def _tiny(low: float, high: float) -> GatedClassifier:
    base = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    return GatedClassifier(
        base, base, Gate((("0", "1"), ("0", "1")), 2, 2, 1), alpha_min=low, alpha_max=high
    )


def test_the_mode_changes_statistics_and_nothing_else() -> None:
    """With frozen statistics a gate in training mode equals the gate in evaluation mode bitwise."""
    model, x = gated(alpha_min=0.5, alpha_max=0.8), images()
    expected = model(x)
    model.train()
    assert model.network.training and not model.accurate.training and not model.robust.training
    assert not torch.equal(model(x), expected)  # statistics of the batch
    for sub in model.network.modules():
        if isinstance(sub, nn.BatchNorm1d | nn.BatchNorm2d):
            sub.eval()
    model.load_state_dict(gated().state_dict(), strict=False)
    torch.testing.assert_close(model(x), model.eval()(x), rtol=0, atol=0)


def test_only_the_gate_has_gradients() -> None:
    model = gated().train()
    before = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if not key.startswith("network.")
    }
    model(images()).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained and trained == {
        name for name, _ in model.named_parameters() if name.startswith("network.")
    }
    assert all(
        torch.equal(value, before[key])
        for key, value in model.state_dict().items()
        if key in before
    )


def test_number_of_parameters() -> None:
    """6.3 million parameters for a pair of ResNet-18, and the official size as an option."""
    g, h = (
        build("resnet18", num_classes=10, image_shape=(3, 32, 32), seed=seed) for seed in (1, 2)
    )
    x = torch.rand(1, 3, 32, 32)
    gates = (new_gate(g, h, x), new_gate(g, h, x, width=256))
    size = [sum(p.numel() for p in gate.parameters()) for gate in gates]
    assert size[0] < 7_000_000 and 44.0e6 < size[1] < 44.1e6
    assert g.training and all(p.requires_grad for p in g.parameters())  # the bases are unchanged


def test_gradients_through_the_gate_are_those_of_the_mixture() -> None:
    model, x = gated(alpha_min=0.1, alpha_max=0.9).double(), images().double()
    at = x.clone().requires_grad_()
    own = torch.autograd.grad(model(at)[:, 0].sum(), at)[0]
    direction = torch.randn(
        x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    step = 1e-6
    expected = (model(x + step * direction)[:, 0] - model(x - step * direction)[:, 0]) / (2 * step)
    torch.testing.assert_close((own * direction).flatten(1).sum(1), expected, rtol=1e-4, atol=1e-7)
    # Without the gate they differ: adversary B has what A has not.
    blind = torch.autograd.grad(model.without_gate_gradient()(at)[:, 0].sum(), at)[0]
    assert (blind - own).abs().max() > 1e-3 * own.abs().max()
    torch.testing.assert_close(model.without_gate_gradient()(x), model(x))


class Brightness(nn.Module):
    """Two classes by the first pixel; the feature layers return the image itself."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.shallow, self.deep, self.sign = nn.Identity(), nn.Identity(), sign

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.shallow(x))
        score = self.sign * 4 * (x.flatten(1)[:, 0] - 0.5) + x.flatten(1)[:, 1] * 0
        return torch.stack((score, -score), dim=1)


class Switch(nn.Module):
    """A gate that trusts h where the second pixel is bright."""

    feature_layers = (("shallow", "deep"), ("shallow", "deep"))

    def forward(self, features: list[tuple[Tensor, Tensor]]) -> Tensor:
        return 12 * (features[0][0].flatten(1)[:, 1] - 0.5)


def test_an_attack_through_the_gate_equals_a_grid_search() -> None:
    """g is wrong and h right, so only the gate can be fooled: the second pixel has to be
    darkened."""
    model = GatedClassifier(Brightness(-1.0), Brightness(1.0), Switch(), scale=1.0, shift=0.0)  # type: ignore[arg-type]
    model.eval()
    second = torch.linspace(0.45, 0.75, 13)
    x = torch.stack((torch.full_like(second, 0.9), second), dim=1).view(-1, 1, 1, 2)
    y, eps = torch.zeros(len(x), dtype=torch.int64), 0.1
    reach = torch.linspace(-eps, eps, 81)
    grid = torch.cartesian_prod(reach, reach).view(1, -1, 1, 1, 2)
    ball = (x.unsqueeze(1) + grid).clamp(0, 1)
    robust = (model(ball.flatten(0, 1)).argmax(1).view(len(x), -1) == 0).all(dim=1)
    assert 0 < int(robust.sum()) < len(x)
    assert torch.equal(model(attack(model, x, y, eps)).argmax(dim=1) == 0, robust)
    # The grey-box adversary has no gradient of the gate.
    blind = attack(model, x, y, eps, surrogate=model.without_gate_gradient())
    assert int((model(blind).argmax(dim=1) == 0).sum()) > int(robust.sum())


def test_the_penalty_lowers_alpha() -> None:
    model, x = gated(), images()
    y = model(x).argmax(dim=1)
    plain, penalised = (
        attack(model, x, y, 0.05),
        attack(model, x, y, 0.05, extra=AlphaPenalty(model, 100.0)),
    )
    changed = (
        (penalised != x).flatten(1).any(dim=1)
    )  # an attack that lowers no margin keeps the image
    assert bool(changed.any()) and bool((model.alphas(penalised) < model.alphas(x))[changed].all())
    assert bool((model.alphas(penalised) < model.alphas(plain))[changed].all())
    alpha = torch.sigmoid(model.log_probabilities_and_gate(x)[2])
    torch.testing.assert_close(AlphaPenalty(model, 2.0)(x), -2 * alpha)
    torch.testing.assert_close(AlphaPenalty(model, 2.0, "published")(x), -2 * torch.log(alpha))


def test_predict_equals_forward_of_a_gated_mixture() -> None:
    model, x = gated(alpha_min=0.7, alpha_max=0.99), images(40)
    assert torch.equal(model.predict(x), model(x).argmax(dim=1))
    assert (
        model.alpha == 0.7
        and int(model.needs_accurate(model.map_robust(model.robust(x))).sum()) > 0
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"hard": True}, {"logit_map": LogitMap(2.0, 3.0, -0.4)}, {"logit_scales": (2.0, 3.0)}],
)
def test_predict_runs_each_base_once(options: dict[str, Any]) -> None:
    """The robust base on all images, the accurate one and the gate on those that h does not
    decide."""
    model, x, seen = gated(alpha_min=0.7, alpha_max=0.99, **options), images(40), dict[str, int]()

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen[name] = seen.get(name, 0) + len(output)

        return hook

    expected, unsure = (
        model(x).argmax(dim=1),
        int(model.needs_accurate(model.map_robust(model.robust(x))).sum()),
    )
    for name in ("accurate", "robust", "network"):
        getattr(model, name).register_forward_hook(record(name))
    assert torch.equal(model.predict(x), expected) and unsure > 0
    assert seen == {"robust": 40, "accurate": unsure, "network": unsure}


def test_a_certificate_of_alpha_min_holds_for_every_gate() -> None:
    """Lemma 3.2 with the least alpha: whatever g and the gate predict, h's class stays."""
    generator = torch.Generator().manual_seed(3)
    p_h = torch.softmax(3 * torch.randn(500, K, generator=generator), dim=1)
    p_g = torch.softmax(9 * torch.randn(500, K, generator=generator), dim=1)
    model = gated(alpha_min=0.6, alpha_max=0.95)
    z = 6 * torch.randn(500, generator=generator)
    top = p_h.topk(2, dim=1).values
    kept = top[:, 0] - top[:, 1] > (1 - model.alpha) / model.alpha
    classes = mix(p_g.log(), p_h.log(), model.restrict_gate(z)).argmax(dim=1)
    assert 50 < int(kept.sum()) < 450
    assert bool((classes == p_h.argmax(dim=1))[kept].all()) and bool(
        (classes != p_h.argmax(dim=1))[~kept].any()
    )


def test_the_same_gate_over_a_map_and_a_hard_decision() -> None:
    model, x = gated(alpha_min=0.8, alpha_max=0.98), images(40)
    nuts = MixedClassifier(
        model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.5, 0.3), hard=True
    )
    over = model.with_settings_of(nuts)
    alpha = model.alphas(x)
    torch.testing.assert_close(over.alphas(x), alpha)
    p_g = torch.nn.functional.one_hot(model.accurate(x).argmax(dim=1), K)
    expected = (1 - alpha)[:, None] * p_g + alpha[:, None] * nuts.map_robust(model.robust(x)).exp()
    torch.testing.assert_close(over(x).exp(), expected)
    # The surrogate has a finite gradient.
    at = x.clone().requires_grad_()
    surrogate = over.surrogate()
    assert torch.isfinite(torch.autograd.grad(surrogate(at)[:, 0].sum(), at)[0]).all()
    assert not over.differentiable and model.differentiable
    with pytest.raises(InputError, match="own bases"):
        model.with_settings_of(MixedClassifier(*pair(), 0.5))


def test_hinges_are_zero_where_g_decides_at_the_alpha_of_the_image() -> None:
    """At the threshold of alpha_min g would decide more images than in the mixture."""
    model, x = gated(alpha_min=0.05, alpha_max=0.95, scale=8.0, logit_scales=(1.0, 6.0)), images(60)
    over = model.with_settings_of(
        MixedClassifier(
            model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.5, 0.3), hard=True
        )
    )
    predicted, p = model.accurate(x).argmax(dim=1), over.log_probabilities(x)[1].exp()
    alpha = over.alphas(x)
    decides = p.amax(dim=1) - p.gather(1, predicted.unsqueeze(1)).squeeze(1) <= (1 - alpha) / alpha
    assert bool(decides.any()) and bool((~decides).any())
    scores = over.hinges()(x).gather(1, predicted.unsqueeze(1)).squeeze(1)
    assert torch.equal(scores == 0, decides | (predicted == p.argmax(dim=1)))
    with pytest.raises(InputError, match="stand_in"):
        over.hinges(stand_in=model.accurate)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"alpha_min": 0.9, "alpha_max": 0.9},
            r"`alpha_min` must be below alpha_max, 0.9, got 0.9",
        ),
        ({"alpha_min": -0.1}, r"`alpha_min` must lie in \[0, 1\]"),
        ({"alpha_max": 1.1}, r"`alpha_max` must lie in \[0, 1\]"),
        ({"scale": 0.0}, r"`scale` must be positive"),
        ({"logit_scales": (1.0, -1.0)}, r"`logit_scales` must be positive"),
    ],
)
def test_invalid_settings_of_a_gate_are_one_sentence(
    settings: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        gated(**settings)


@pytest.mark.parametrize(
    "layers", [("layer1", "layer2"), (("layer1",), ("conv1", "conv2")), (("layer1", "layer2"),)]
)
def test_feature_layers_are_two_names_for_each_base(layers: Any) -> None:
    with pytest.raises(
        InputError, match="`feature_layers` must hold two names for the accurate and two for the"
    ):
        new_gate(*pair(), images(2), feature_layers=layers)


def test_a_gate_over_bases_of_other_widths_is_an_error() -> None:
    gate, wide = gated().network, build("resnet18", num_classes=K, image_shape=(C, H, W), seed=3)
    model = GatedClassifier(wide, pair()[1], gate)
    with pytest.raises(
        InputError,
        match=r"`bases` must be those of the gate, with 32 and 64 channels at its feature "
        r"layers, got \(80, 160\)",
    ):
        model(images())


@pytest.mark.parametrize(
    ("logit_map", "name"),
    [
        (None, "gate"),
        (LogitMap(2.0, 1.5, 0.3), "gate on the NUTS map (ours)"),
        (LogitMap(2.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0), "gate on the confidence switch"),
    ],
)
def test_the_name_of_a_gated_mixture(logit_map: LogitMap | None, name: str) -> None:
    model = gated()
    assert (
        GatedClassifier(model.accurate, model.robust, model.network, logit_map=logit_map).method
        == name
    )


def test_an_unknown_form_of_the_penalty_is_an_error() -> None:
    with pytest.raises(InputError, match="`form` must be one of published, share, got 'log'"):
        AlphaPenalty(gated(), form="log")
