"""Verdicts where logits are tiny or huge: probabilities tie or saturate in float32, logits do
not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attack_models import ConvNet, DividedByMargin, Excluding, Scaled, Waves, make_data

from equipoise import models
from equipoise.attacks import (
    Apgd,
    Attack,
    Fab,
    Square,
    TargetedApgd,
    attack_dataset,
    fast,
    standard,
)
from equipoise.core.threat import Threat
from equipoise.data import load_data
from equipoise.evaluation import evaluate

THREATS = [Threat("linf", 0.04), Threat("l2", 0.4)]
SCALE_FREE: dict[str, Attack] = {
    "square": Square(150),
    "fab": Fab(10, (1, 2)),
    "fab by distance": Fab(10, (1,), "distance"),
    "targeted": TargetedApgd(8, (1, 2)),
    "dlr": Apgd("dlr", 8),
    "relative-margin": Apgd("relative-margin", 8),
    "relative-ce": Apgd("relative-ce", 8),
}
# Amplitude, frequency and eps: images that fast breaks, and that standard breaks.
WAVES: dict[tuple[float, float, float], tuple[int, int]] = {
    (0.005, 2000, 0.015): (10, 16),
    (0.01, 400, 0.009): (11, 11),
}


@pytest.fixture
def model() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet().eval()


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", SCALE_FREE)
def test_the_scale_of_logits_changes_no_verdict(model: ConvNet, name: str, threat: Threat) -> None:
    data = make_data(model, 40)
    expected = attack_dataset(SCALE_FREE[name], model, data, threat=threat, seed=0)
    assert 0 < int((expected.broken_stage > 0).sum()) < int((expected.broken_stage != 0).sum())
    for scale in (1e-8, 1e4):
        state = attack_dataset(
            SCALE_FREE[name], Scaled(model, scale).eval(), data, threat=threat, seed=0
        )
        assert state.survived.tolist() == expected.survived.tolist(), scale


@pytest.mark.parametrize("loss", ["relative-margin", "relative-ce"])
def test_excluded_classes_hide_no_gradient(model: ConvNet, loss: str) -> None:
    """A logit of −inf made every gradient of these losses nan, which counts as 0: only the random
    start was tried."""
    data = make_data(model, 40)
    one, other = (
        attack_dataset(Apgd(loss, 8), network, data, threat=THREATS[0], seed=0)
        for network in (model, Excluding(model).eval())
    )
    broken = [int((state.broken_stage > 0).sum()) for state in (one, other)]
    assert abs(broken[0] - broken[1]) <= 2 < broken[0], "the deviation has two classes more"


@pytest.mark.parametrize("exponent", [-27, 13])
def test_fast_makes_the_same_steps_at_any_scale(model: ConvNet, exponent: int) -> None:
    """A power of two scales every logit exactly; the gates of the longer runs open for the same
    images."""
    data = make_data(model, 16)
    one, other = (
        attack_dataset(fast(), model_, data, threat=THREATS[0], seed=0)
        for model_ in (model, Scaled(model, 2.0**exponent).eval())
    )
    assert one.broken_stage.tolist() == other.broken_stage.tolist()
    torch.testing.assert_close(one.passes, other.passes)
    torch.testing.assert_close(one.margin_ratio, other.margin_ratio, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1, 100, 1e-8])
@pytest.mark.parametrize("num_classes", [10, 2])
@pytest.mark.parametrize("setting", WAVES, ids=str)
def test_fast_on_steep_waves(
    setting: tuple[float, float, float], num_classes: int, scale: float
) -> None:
    """Gates on probabilities let 1 to 6 of these images pass that the same runs break with gates on
    logits."""
    amplitude, frequency, eps = setting
    waves = Waves(amplitude, frequency, num_classes).eval()
    state = attack_dataset(
        fast(), Scaled(waves, scale).eval(), waves.data(), threat=Threat("linf", eps), seed=0
    )
    assert int((state.broken_stage > 0).sum()) >= WAVES[setting][0]
    assert not bool((~state.survived & ~waves.breakable(eps)).any()), "what cannot be broken is not"


def test_an_audit_exposes_what_fast_leaves_of_steep_waves() -> None:
    (amplitude, frequency, eps), (by_fast, by_standard) = next(iter(WAVES.items()))
    waves = Waves(amplitude, frequency).eval()
    result = evaluate(waves, waves.data(), threat=Threat("linf", eps), audit=32, device="cpu")
    (audit,) = result.summary.audits
    assert audit.audited == audit.survivors and audit.broken >= by_standard - by_fast > 0
    assert f"{audit.broken} broken" in str(result)
    assert "black box beats white box" in {
        check.name for check in result.summary.sanity_checks if check.alarm
    }


@pytest.mark.slow
@pytest.mark.parametrize("setting", WAVES, ids=str)
def test_standard_on_steep_waves(setting: tuple[float, float, float]) -> None:
    """Where every gradient misleads, only Square finds the rest: this is what an audit is for."""
    amplitude, frequency, eps = setting
    waves = Waves(amplitude, frequency).eval()
    verdicts = {
        scale: attack_dataset(
            standard(),
            Scaled(waves, scale).eval(),
            waves.data(),
            seed=0,
            threat=Threat("linf", eps),
        ).survived
        for scale in (1, 1e-8)
    }
    print(
        {scale: int((~survived).sum()) for scale, survived in verdicts.items()},
        "broken of",
        int(waves.breakable(eps).sum()),
    )
    for survived in verdicts.values():
        assert WAVES[setting][1] <= int((~survived).sum()) and not bool(
            (~survived & ~waves.breakable(eps)).any()
        )


@pytest.mark.slow
def test_fast_on_logits_divided_by_their_own_margin(real_weights: Path, real_data: Path) -> None:
    """They have no gradient towards the runner-up, so that its linearised distance is the largest
    of all."""
    data = load_data("cifar10", data_dir=real_data, count=256)
    model = models.load(f"file:{real_weights / 'cifar10_resnet8_pgd_at_linf8.safetensors'}").eval()
    left = [
        int(
            attack_dataset(
                fast(), network, data, threat=Threat("linf", 8 / 255), seed=0
            ).survived.sum()
        )
        for network in (model, DividedByMargin(model).eval())
    ]
    print("images left by fast, of 256:", *left)
    assert left[0] <= left[1] <= left[0] + 5
