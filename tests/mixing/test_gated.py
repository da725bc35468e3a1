"""The gate and the mixture it steers: formula, range, bases, adversaries' views, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gate_pairs import B, K, gated, images, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise import mixing
from equipoise.attacks import apgd, pgd
from equipoise.certification.mixture import keeps_class
from equipoise.core import rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, mix, new_gate
from equipoise.mixing.gate import OFFICIAL, load_gate, save_gate
from equipoise.mixing.gated_surrogate import AlphaPenalty
from equipoise.models import build, checkpoint, feature_hooks, formats


def test_the_formula_is_the_mixture_at_every_image_s_own_alpha() -> None:
    model, x = gated(alpha_min=0.6, alpha_max=0.9, scale=3.0, shift=-0.2, sharpness=(1.5, 0.5)), images()
    u = model.network([feature_hooks.tapped(base, taps, x)[1] for base, taps in
                       zip((model.accurate, model.robust), model.network.taps, strict=True)])
    alpha = 0.6 + 0.3 * torch.sigmoid(3.0 * u - 0.2)
    assert alpha.max() - alpha.min() > 0.02
    p_g, p_h = torch.softmax(1.5 * model.accurate(x), dim=1), torch.softmax(0.5 * model.robust(x), dim=1)
    expected = (1 - alpha)[:, None] * p_g + alpha[:, None] * p_h
    torch.testing.assert_close(model(x).exp(), expected)
    torch.testing.assert_close(model.alphas(x), alpha)


def test_one_pass_of_each_base_and_of_the_gate() -> None:
    model, passes = gated(), {"accurate": 0, "robust": 0, "network": 0}
    for name in passes:
        getattr(model, name).register_forward_hook(
            lambda module, inputs, output, name=name: passes.__setitem__(name, passes[name] + 1))
    model(images())
    assert passes == {"accurate": 1, "robust": 1, "network": 1}


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 0.99), st.floats(0.001, 1), st.floats(-40, 40))
def test_the_range_holds_and_is_exact(low: float, wide: float, z: float) -> None:
    model = _tiny(low, min(low + wide, 1.0))
    gate = model.ranged(torch.tensor([z], dtype=torch.float64))
    alpha = low + (model.range[1] - low) * torch.sigmoid(torch.tensor([z], dtype=torch.float64))
    torch.testing.assert_close(torch.sigmoid(gate), alpha, rtol=1e-6, atol=1e-12)
    assert bool(gate.isfinite().all())


def _tiny(low: float, high: float) -> GatedClassifier:
    base = nn.Conv2d(1, 1, 1)
    return GatedClassifier(base, base, nn.Identity(), alpha_min=low, alpha_max=high)  # type: ignore[arg-type]


def test_the_mode_changes_statistics_and_nothing_else() -> None:
    """With frozen statistics a gate in training mode is the gate in evaluation mode, bit by bit."""
    model, x = gated(alpha_min=0.5, alpha_max=0.8), images()
    wanted = model(x)
    model.train()
    assert model.network.training and not model.accurate.training and not model.robust.training
    assert not torch.equal(model(x), wanted)  # statistics of the batch
    for sub in model.network.modules():
        if isinstance(sub, nn.BatchNorm1d | nn.BatchNorm2d):
            sub.eval()
    model.load_state_dict(gated().state_dict(), strict=False)
    torch.testing.assert_close(model(x), model.eval()(x), rtol=0, atol=0)


def test_only_the_gate_learns() -> None:
    model = gated().train()
    before = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("network.")}
    model(images()).square().sum().backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learning and learning == {name for name, _ in model.named_parameters() if name.startswith("network.")}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)


def test_sizes() -> None:
    """6.3 million numbers for a pair of ResNet-18, and the official size as an option."""
    g, h = (build("resnet18", num_classes=10, image_shape=(3, 32, 32), seed=seed) for seed in (1, 2))
    x = torch.rand(1, 3, 32, 32)
    gates = (new_gate(g, h, x), new_gate(g, h, x, width=OFFICIAL))
    size = [sum(p.numel() for p in gate.parameters()) for gate in gates]
    assert size[0] < 7_000_000 and 44.0e6 < size[1] < 44.1e6
    assert g.training and all(p.requires_grad for p in g.parameters())  # only looked at


def test_gradients_through_the_gate_are_those_of_the_mixture() -> None:
    model, x = gated(alpha_min=0.1, alpha_max=0.9).double(), images().double()
    at = x.clone().requires_grad_()
    own = torch.autograd.grad(model(at)[:, 0].sum(), at)[0]
    way = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-6
    slope = (model(x + step * way)[:, 0] - model(x - step * way)[:, 0]) / (2 * step)
    torch.testing.assert_close((own * way).flatten(1).sum(1), slope, rtol=1e-4, atol=1e-7)
    # Without the gate's part they are others: adversary B sees what A does not.
    blind = torch.autograd.grad(model.stopped()(at)[:, 0].sum(), at)[0]
    assert (blind - own).abs().max() > 1e-3 * own.abs().max()
    torch.testing.assert_close(model.stopped()(x), model(x))


class Brightness(nn.Module):
    """Two classes by the mean of two pixels; the tap is the image itself."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.tap, self.deep, self.sign = nn.Identity(), nn.Identity(), sign

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.tap(x))
        score = self.sign * 4 * (x.flatten(1)[:, 0] - 0.5) + x.flatten(1)[:, 1] * 0
        return torch.stack((score, -score), dim=1)


class Switch(nn.Module):
    """A gate that trusts h where the second pixel is bright."""

    taps = (("tap", "deep"), ("tap", "deep"))

    def forward(self, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        return 12 * (seen[0][0].flatten(1)[:, 1] - 0.5)


def test_an_attack_finds_what_every_point_of_the_ball_shows() -> None:
    """g is wrong and h right, so only the gate can be fooled: the second pixel has to be darkened."""
    model = GatedClassifier(Brightness(-1.0), Brightness(1.0), Switch(), scale=1.0, shift=0.0).eval()  # type: ignore[arg-type]
    second = torch.linspace(0.45, 0.75, 13)
    x = torch.stack((torch.full_like(second, 0.9), second), dim=1).view(-1, 1, 1, 2)
    y, eps = torch.zeros(len(x), dtype=torch.int64), 0.1
    reach = torch.linspace(-eps, eps, 81)
    grid = torch.cartesian_prod(reach, reach).view(1, -1, 1, 1, 2)
    ball = (x.unsqueeze(1) + grid).clamp(0, 1)
    standing = (model(ball.flatten(0, 1)).argmax(1).view(len(x), -1) == 0).all(dim=1)
    assert 0 < int(standing.sum()) < len(x)
    threat, chance = Threat("linf", eps), rng.stream(0, "test", torch.arange(len(x)))
    for attack in (pgd, apgd):
        x_adv = attack(model, x, y, threat=threat, stream=chance)
        assert torch.equal(model(x_adv).argmax(dim=1) == 0, standing)
    # The grey-box adversary does not know which way to push the gate.
    blind = pgd(model, x, y, threat=threat, stream=chance, surrogate=model.stopped())
    assert int((model(blind).argmax(dim=1) == 0).sum()) > int(standing.sum())


def test_the_extra_term_pushes_alpha_down() -> None:
    model, x = gated(), images()
    y = model(x).argmax(dim=1)
    chance, threat = rng.stream(0, "test", torch.arange(B)), Threat("linf", 0.05)
    plain = pgd(model, x, y, threat=threat, stream=chance)
    pushed = pgd(model, x, y, threat=threat, stream=chance, extra=AlphaPenalty(model, 100.0))
    moved = (pushed != x).flatten(1).any(dim=1)  # an attack that comes no nearer keeps the image
    assert bool(moved.any()) and bool((model.alphas(pushed) < model.alphas(x))[moved].all())
    assert bool((model.alphas(pushed) < model.alphas(plain))[moved].all())
    alpha = torch.sigmoid(model.parts(x)[2])
    torch.testing.assert_close(AlphaPenalty(model, 2.0)(x), -2 * alpha)
    torch.testing.assert_close(AlphaPenalty(model, 2.0, "published")(x), -2 * torch.log(alpha))


def test_prediction_asks_the_gate_only_where_it_can_decide() -> None:
    model, x = gated(alpha_min=0.7, alpha_max=0.99), images(40)
    assert torch.equal(model.predict(x), model(x).argmax(dim=1))
    assert model.alpha == 0.7 and int(model.undecided(model.mapped(model.robust(x))).sum()) > 0


def test_a_certificate_of_alpha_min_holds_for_every_gate() -> None:
    """Lemma 3.2 with the least alpha: whatever g and the gate say, h's class stays."""
    chance = torch.Generator().manual_seed(3)
    p_h = torch.softmax(3 * torch.randn(500, K, generator=chance), dim=1)
    p_g = torch.softmax(9 * torch.randn(500, K, generator=chance), dim=1)
    model = gated(alpha_min=0.6, alpha_max=0.95)
    z = 6 * torch.randn(500, generator=chance)
    kept = keeps_class(p_h, model.alpha)
    answer = mix(p_g.log(), p_h.log(), model.ranged(z)).argmax(dim=1)
    assert 50 < int(kept.sum()) < 450
    assert bool((answer == p_h.argmax(dim=1))[kept].all()) and bool((answer != p_h.argmax(dim=1))[~kept].any())


def test_the_same_gate_over_a_map_and_a_hard_decision() -> None:
    model, x = gated(alpha_min=0.8, alpha_max=0.98), images(40)
    nuts = MixedClassifier(model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.5, 0.3), hard=True)
    over = model.on(nuts)
    alpha = model.alphas(x)
    torch.testing.assert_close(over.alphas(x), alpha)
    p_g = torch.nn.functional.one_hot(model.accurate(x).argmax(dim=1), K)
    expected = (1 - alpha)[:, None] * p_g + alpha[:, None] * nuts.mapped(model.robust(x)).exp()
    torch.testing.assert_close(over(x).exp(), expected)
    # What adversaries follow is soft, and g's gradient counts in it.
    at = x.clone().requires_grad_()
    follow = over.surrogate()
    assert torch.isfinite(torch.autograd.grad(follow(at)[:, 0].sum(), at)[0]).all()
    assert not over.differentiable and model.differentiable
    with pytest.raises(InputError, match="own bases"):
        model.on(MixedClassifier(*pair(), 0.5))


def test_hinges_are_zero_where_the_image_s_own_alpha_lets_g_pass() -> None:
    """The threshold of alpha_min would let more pass than the mixture does."""
    model, x = gated(alpha_min=0.05, alpha_max=0.95, scale=8.0, sharpness=(1.0, 6.0)), images(60)
    over = model.on(MixedClassifier(model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.5, 0.3), hard=True))
    named, p = model.accurate(x).argmax(dim=1), over.both(x)[1].exp()
    alpha = over.alphas(x)
    passes = p.amax(dim=1) - p.gather(1, named.unsqueeze(1)).squeeze(1) <= (1 - alpha) / alpha
    assert bool(passes.any()) and bool((~passes).any())
    scores = over.hinges()(x).gather(1, named.unsqueeze(1)).squeeze(1)
    assert torch.equal(scores == 0, passes | (named == p.argmax(dim=1)))
    with pytest.raises(InputError, match="stand_in"):
        over.hinges(stand_in=model.accurate)


@pytest.mark.parametrize(("numbers", "said"), [
    ({"alpha_min": 0.9, "alpha_max": 0.9}, r"`alpha_min` must be below alpha_max, 0.9, got 0.9"),
    ({"alpha_min": -0.1}, r"`alpha_min` must lie in \[0, 1\]"),
    ({"alpha_max": 1.1}, r"`alpha_max` must lie in \[0, 1\]"),
    ({"scale": 0.0}, r"`scale` must be positive"),
    ({"sharpness": (1.0, -1.0)}, r"`sharpness` must be positive"),
])
def test_mistakes_are_one_sentence(numbers: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        gated(**numbers)


@pytest.mark.parametrize("taps", [("layer1", "layer2"), (("layer1",), ("conv1", "conv2")), (("layer1", "layer2"),)])
def test_taps_are_two_names_for_each_base(taps: Any) -> None:
    with pytest.raises(InputError, match=r"`taps` must hold two names for the accurate and two for the robust base"):
        new_gate(*pair(), images(2), taps=taps)


def test_a_gate_over_bases_of_other_widths_is_told() -> None:
    gate, wide = gated().network, build("resnet18", num_classes=K, image_shape=images().shape[1:], seed=3)  # type: ignore[arg-type]
    model = GatedClassifier(wide, pair()[1], gate)
    with pytest.raises(InputError, match=r"`bases` must be those of the gate, with 32 and 64 channels at its taps, got "
                                         r"\(80, 160\)"):
        model(images())


def test_a_term_has_one_of_its_forms() -> None:
    with pytest.raises(InputError, match="`form` must be one of published, share, got 'log'"):
        AlphaPenalty(gated(), form="log")


def test_a_gate_of_other_bases_is_refused(tmp_path: Path) -> None:
    model, x = gated(), images()
    save_gate(tmp_path / "gate.safetensors", model.network, model.accurate, model.robust)
    again = load_gate(tmp_path / "gate.safetensors", model.accurate, model.robust)
    assert again.taps == model.network.taps and not again.training
    assert torch.equal(GatedClassifier(model.accurate, model.robust, again)(x), model(x))
    with pytest.raises(InputError, match=r"`accurate` must be the base that .* was trained for, with weights \w{12}"):
        load_gate(tmp_path / "gate.safetensors", model.robust, model.accurate)
    state, told = formats.read_safetensors(tmp_path / "gate.safetensors")
    formats.write_safetensors(tmp_path / "other.safetensors", {**state, "fc.weight": torch.zeros(1, 3)}, told)
    with pytest.raises(InputError, match=r"must hold the \d+ tensors of this gate"):
        load_gate(tmp_path / "other.safetensors", model.accurate, model.robust)


def test_a_gated_mixture_on_disk(tmp_path: Path) -> None:
    model = gated(alpha_min=0.55, alpha_max=0.95, scale=1.5, shift=0.1, sharpness=(2.0, 0.5))
    for side in ("accurate", "robust"):
        checkpoint.save(tmp_path / f"{side}.safetensors", getattr(model, side), {})
    mixing.save(tmp_path, model, accurate=str(tmp_path / "accurate.safetensors"),
                robust=str(tmp_path / "robust.safetensors"))
    loaded = mixing.load(f"mixture:{tmp_path}")
    assert isinstance(loaded, GatedClassifier) and loaded.extra_repr() == model.extra_repr()
    assert torch.equal(loaded(images()), model(images()))
    over = model.on(MixedClassifier(model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.5, 0.3),
                                    surrogate_alpha=0.7))
    mixing.save(tmp_path / "over", over, accurate=str(tmp_path / "accurate.safetensors"),
                robust=str(tmp_path / "robust.safetensors"))
    again = mixing.load(f"mixture:{tmp_path}/over")
    assert isinstance(again, GatedClassifier) and again.surrogate_alpha == 0.7, "attacks follow it without hard, too"
    assert torch.equal(again.surrogate()(images()), over.surrogate()(images()))
    text = (tmp_path / "mixture.toml").read_text()
    (tmp_path / "mixture.toml").write_text(text.replace("alpha_max = 0.95", "alpha_max = 0.5"))
    with pytest.raises(InputError, match="`alpha_min` must be below alpha_max"):
        mixing.load(f"mixture:{tmp_path}")
