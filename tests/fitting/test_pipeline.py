"""The fit of a mixture from two models and images, attack included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from linear_pair import QUICK, Function, Linear, NoGradients, make_attack, make_data, make_pair
from torch import nn

from equipoise.core.checks import InputError
from equipoise.fitting import artifacts
from equipoise.fitting.cached_logits import ANY_CLASS
from equipoise.fitting.conformal import beta, lose_at_most
from equipoise.fitting.pipeline import ReusedMap, fit_mixture
from equipoise.mixing import HardLabels, LogitMap, Provenance

TARGET = lose_at_most(10.0)


def test_mixture_that_helps() -> None:
    fitted = fit_mixture(
        make_attack(*make_pair(), settings=dataclasses.replace(QUICK, rounds=1)), TARGET
    )
    assert fitted.summary.helped and fitted.summary.clean > fitted.summary.robust_clean
    assert any(note.startswith("round 1") for note in fitted.summary.notes)
    assert fitted.mixture.provenance is not None and fitted.mixture.provenance.images == (
        "100-299",
    )


def test_reused_map_is_not_searched() -> None:
    """No note of a search and no rejected candidate; the reused map is the only one."""
    record = Provenance("random", "test", ("100-149",), rule="nuts")
    like = ReusedMap(LogitMap(1.0, 1.0, 0.0, "linear"), record)
    fitted = fit_mixture(make_attack(*make_pair()), TARGET, like=like)
    assert not fitted.summary.rejected
    assert (
        len(fitted.summary.notes) == 1
        and "selected the map that is reused" in fitted.summary.notes[0]
    )
    assert fitted.mixture.provenance is not None and fitted.mixture.provenance.reused is not None
    assert fitted.mixture.provenance.reused.images == ("100-149",)
    saved = artifacts.arrays(fitted)
    assert saved.landscape.size == 1 and saved.map_curve is not None


def test_cached_logits_replace_the_first_attack(tmp_path: Path) -> None:
    accurate, robust = make_pair()
    attack, target = make_attack(accurate, robust), beta(0.8)
    first = fit_mixture(attack, target, tmp_path)
    calls = robust.calls
    again = fit_mixture(attack, target, tmp_path)
    assert again.summary == first.summary
    assert robust.calls - calls == 2, "only the checks of the inputs run the model"


def test_the_accurate_model_is_not_run_at_attacked_points() -> None:
    """Logits of h come with the verdicts, and what g predicts there does not matter."""
    accurate, robust = make_pair()
    attack, logit_map = make_attack(accurate, robust), LogitMap(1.0, 1.0, 0.0)
    calls = accurate.calls
    points = attack.run(logit_map)
    assert accurate.calls == calls and points.g is None


def test_against_the_pair() -> None:
    settings = dataclasses.replace(QUICK, against="pair", rule="nuts")
    fitted = fit_mixture(make_attack(*make_pair(), settings=settings), TARGET)
    assert (
        fitted.summary.helped
        and "against an attack on both models at once" in fitted.summary.promise
    )
    assert bool((fitted.calibration.all_logits.accurate_attacked != ANY_CLASS).any())


def test_accurate_model_that_returns_classes() -> None:
    accurate, robust = make_pair()
    labels = HardLabels(lambda x: accurate(x).argmax(1))
    assert (
        fit_mixture(make_attack(labels, robust), TARGET).summary
        == fit_mixture(make_attack(accurate, robust), TARGET).summary
    )


def test_classes_of_any_integer_type() -> None:
    accurate, robust = make_pair()
    fitted = fit_mixture(
        make_attack(Function(lambda x: accurate(x).argmax(1).int()), robust), TARGET
    )
    with torch.no_grad():
        assert fitted.mixture(make_data(4).images.float() / 255).shape == (4, 4)


def test_random_search_without_gradients(tmp_path: Path) -> None:
    """Also in a fit that was interrupted after its first attack."""
    settings = dataclasses.replace(QUICK, rounds=1, steps=1, targets=1, pool=1)
    attack = make_attack(*make_pair(NoGradients), make_data(60), settings)
    first, resumed = (fit_mixture(attack, lose_at_most(20.0), tmp_path).summary for _ in range(2))
    assert any("random search" in note for note in first.notes) and first == resumed
    free = dataclasses.replace(attack, settings=dataclasses.replace(settings, gradient_free=True))
    explicit = fit_mixture(free, lose_at_most(20.0)).summary
    assert dataclasses.replace(first, notes=()) == dataclasses.replace(explicit, notes=())


def test_robust_model_alone_if_no_mixture_helps() -> None:
    accurate, robust = make_pair()
    fitted = fit_mixture(make_attack(Linear(-accurate.weight.detach()), robust), TARGET)
    x = make_data().images.float() / 255
    with torch.no_grad():
        assert not fitted.summary.helped and torch.equal(
            fitted.mixture.predict(x), robust(x).argmax(1)
        )


def nan(model: Linear) -> nn.Module:
    nn.init.constant_(model.weight, torch.nan)
    return model


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g, h: (g, Linear(torch.randn(5, 48))), r"equal numbers of classes, got \(4, 5\)"),
        (lambda g, h: (g, nan(h)), "the robust model must output finite logits"),
        (lambda g, h: (nan(g), h), "the accurate model must output finite logits"),
        (
            lambda g, h: (g, Linear(-g.weight.detach())),
            "classify at least one attacked image correctly",
        ),
        (
            lambda g, h: (g, Linear(2 * g.weight.detach())),
            "must differ, got the same predictions on all 200 images",
        ),
        (
            lambda g, h: (g, Function(lambda x: h(x).argmax(1))),
            r"`robust` must output logits \(B, K\), got 'shape",
        ),
        (
            lambda g, h: (Function(lambda x: x), h),
            r"`accurate` must output logits \(B, K\) or classes \(B,\)",
        ),
        (
            lambda g, h: (Function(lambda x: g(x).tolist()), h),
            "`accurate` must return one tensor, got 'list'",
        ),
        (
            lambda g, h: (Function(lambda x: x[9999]), h),
            r"`accurate` must take images of shape \(3, 4, 4\), but raised",
        ),
        (
            lambda g, h: (Function(lambda x: g(x).argmax(1) + 4), h),
            "`classes of the accurate model` must lie in 0..3",
        ),
        (
            lambda g, h: (Function(lambda x: g(x).amax(1)), h),
            "`classes of the accurate model` must be whole numbers",
        ),
    ],
)
def test_unusable_models(
    change: Callable[[Linear, Linear], tuple[nn.Module, nn.Module]], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        fit_mixture(make_attack(*change(*make_pair())), TARGET)


def test_too_few_images() -> None:
    with pytest.raises(InputError, match="`count` must give at least 50 images to fit on, got 49"):
        fit_mixture(make_attack(*make_pair(), make_data(49)), TARGET)
