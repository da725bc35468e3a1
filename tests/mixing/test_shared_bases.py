"""One pass of the bases serves a surrogate, the mixture's own logits and an extra term, with the
same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gate_pairs import gated, images
from torch import Tensor, nn

from equipoise.attacks import gradients
from equipoise.attacks.fused import agree
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.core import losses
from equipoise.mixing import (
    AlphaPenalty,
    CascadedClassifier,
    GatedClassifier,
    LogitMap,
    MixedClassifier,
)
from equipoise.mixing.cascade import BothStages, CascadeMargins
from equipoise.mixing.surrogates import Sides, hinge_sums
from equipoise.models.layers.tta import TTAClassifier

NUTS, SWITCH = LogitMap(1.3, 2.0, -0.5), LogitMap(1.0, 1.0, 0.0, rivals=0.0)


def over_map(logit_map: LogitMap | None) -> GatedClassifier:
    """A gated mixture; with a map its own gradients are hidden."""
    model = gated()
    if logit_map is None:
        return model
    return model.with_settings_of(
        MixedClassifier(model.accurate, model.robust, 0.7, logit_map=logit_map, hard=True)
    )


def fixed(logit_map: LogitMap | None) -> MixedClassifier:
    """The same bases with one alpha."""
    model = gated()
    return MixedClassifier(model.accurate, model.robust, 0.7, logit_map=logit_map, hard=True).eval()


def margins_of_a_cascade() -> tuple[nn.Module, GradientSettings]:
    """What a fit attacks: the robust side of a cascade, by the gradients of both stages."""
    model = gated()
    cascade = CascadedClassifier(
        model.accurate,
        TTAClassifier(model.robust, 6),
        0.7,
        first_q=0.3,
        first_scale=2.0,
        logit_map=SWITCH,
    ).eval()
    return CascadeMargins(cascade).eval(), GradientSettings(BothStages(cascade), follow="surrogate")


def cross_entropy(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return losses.cross_entropy(z, y)


def hinges(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return -hinge_sums(z, y, "mapped", reserve=0.05).sum(dim=1)


CASES: dict[str, Callable[[], tuple[nn.Module, GradientSettings]]] = {
    "surrogate": lambda: (m := fixed(NUTS), GradientSettings(m.surrogate())),
    "tempered": lambda: (
        m := fixed(SWITCH),
        GradientSettings(m.tempered_surrogate(), follow="surrogate"),
    ),
    "scores": lambda: (m := fixed(SWITCH), GradientSettings(m.hinges(), follow="surrogate")),
    "hinges": lambda: (m := fixed(NUTS), GradientSettings(Sides(m), follow="surrogate")),
    "gate": lambda: (m := over_map(None), GradientSettings(extra=AlphaPenalty(m))),
    "gate over a map": lambda: (
        m := over_map(NUTS),
        GradientSettings(m.surrogate(), AlphaPenalty(m)),
    ),
    "margins of a cascade": margins_of_a_cascade,
    "scores of a gate": lambda: (
        m := over_map(NUTS),
        GradientSettings(m.hinges(), AlphaPenalty(m), "surrogate"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_runs_every_base_once_and_gives_the_numbers_of_separate_passes(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = CASES[case]()
    x = images(9)
    y = model(x).argmax(dim=1)
    y[::3] = (y[::3] + 1) % 6
    results, passes = [], []
    calls: list[str] = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(gradients, "shared_bases", lambda model, others, example: None)
        source = GradientSource(model, settings, "auto", x)
        assert (source.bases is not None) is shared
        step = source.value_and_gradient(case, hinges if case == "hinges" else cross_entropy)
        calls.clear()
        with nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: calls.append(type(module).__name__)
        ):
            results.append(step(x, y, y))
        passes.append(calls.count("Conv2d"))
    for ours, separate in zip(*results, strict=True):
        torch.testing.assert_close(ours, separate, rtol=1e-5, atol=1e-6)
    calls.clear()
    with nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: calls.append(type(module).__name__)
    ):
        model(x)
    assert passes[0] == calls.count("Conv2d") < passes[1] and bool(results[0][1].abs().sum() > 0)


def test_a_stand_in_is_no_base_of_the_mixture() -> None:
    model = fixed(NUTS)
    stand_in = gated().accurate
    for surrogate in (
        model.surrogate(stand_in=stand_in),
        model.hinges(stand_in=stand_in),
        Sides(model, stand_in),
    ):
        assert GradientSource(model, GradientSettings(surrogate), "auto", images(4)).bases is None


def test_classes_of_an_accurate_side_are_not_joined_with_logits() -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).sum(dim=1).long() % 6

    model = MixedClassifier(Classes(), gated().robust, 0.7, logit_map=NUTS, hard=True).eval()
    source = GradientSource(model, GradientSettings(model.surrogate()), "auto", images(4))
    assert source.bases is None
    x, y = images(4).requires_grad_(), torch.zeros(4, dtype=torch.int64)
    expected = torch.autograd.grad(losses.cross_entropy(model.surrogate()(x), y).sum(), x)[0]
    gradient = source.value_and_gradient("ce", cross_entropy)(x.detach(), y, y)[1]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["surrogate", "hinges", "tempered_surrogate"])
def test_the_surrogate_of_a_fixed_mixture_serves_a_gate_of_the_same_bases(kind: str) -> None:
    model = over_map(NUTS)
    same = MixedClassifier(model.accurate, model.robust, 0.7, logit_map=NUTS, hard=True).eval()
    surrogate = getattr(same, kind)()
    x, y = images(4), torch.zeros(4, dtype=torch.int64)
    source = GradientSource(model, GradientSettings(surrogate, follow="surrogate"), "auto", x)
    assert source.bases is not None
    torch.testing.assert_close(
        source.value_and_gradient("ce", cross_entropy)(x, y, y)[0],
        losses.cross_entropy(surrogate(x), y),
        rtol=1e-4,
        atol=1e-5,
    )


def test_copies_must_agree_with_each_base() -> None:
    """The logits of one base may be much smaller than those of the other."""
    g, h = 10 * torch.randn(8, 6), 0.3 * torch.randn(8, 6)
    noisy = torch.cat([g, h + 0.3 * torch.randn(8, 6)], dim=1)
    assert agree(noisy, torch.cat([g, h], dim=1), 0.05) and not agree(
        noisy, torch.cat([g, h], dim=1), 0.05, (6, 6)
    )
