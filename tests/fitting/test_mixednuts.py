"""The whole fit on small linear models, attack included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import minimum_margin
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.fitting import (
    AttackStrength,
    Cache,
    Fit,
    FitSettings,
    artifacts,
    beta,
    fit,
    lose_at_most,
    margin_attack,
)
from equipoise.mixing import HardLabels, LogitMap

THREAT = Threat("linf", 0.004)
QUICK = AttackStrength(steps=4, targets=2, pool=2)
SETTINGS = FitSettings(strength=QUICK)


class Linear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.weight.T


class NoGradients(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def _pair(robust: type[Linear] = Linear) -> tuple[Linear, Linear]:
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 48, generator=chance)
    noise = torch.randn(4, 48, generator=chance)
    return Linear(3 * weight), robust(weight + 0.7 * noise)


def _data(count: int = 200) -> Dataset:
    chance = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 3, 4, 4), generator=chance, dtype=torch.uint8)
    with torch.no_grad():
        labels = _pair()[0](images.float() / 255).argmax(1)
    return Dataset("made", "test", images, labels, torch.arange(100, 100 + count), ("a", "b", "c", "d"))


@pytest.fixture(scope="module")
def made() -> Fit:
    return fit(*_pair(), _data(), threat=THREAT, target=lose_at_most(10.0), settings=SETTINGS)


def test_a_mixture_that_helps_and_says_what_it_promises(made: Fit) -> None:
    assert made.helped and made.mixture.hard and made.mixture.logit_map is not None
    assert made.numbers["clean"] > made.numbers["robust_clean"]
    assert "loses at most 10 points of robust accuracy in expectation" in made.promise
    assert "100 images that did not choose the map" in made.promise
    assert made.mixture.fitted is not None and made.mixture.fitted.images == ("100-299",)
    assert 1e-3 <= made.mixture.q < 1 and 0.5 <= made.mixture.surrogate_alpha <= 1
    assert any(note.startswith("round 1") for note in made.notes)


def test_the_numbers_are_those_of_the_mixture(made: Fit) -> None:
    """Clean accuracy on the second half, measured by running the mixture itself."""
    second = set(made.cache.halves(0)[1].index.tolist())
    data = _data()
    part = data.take(torch.tensor([i in second for i in data.index.tolist()]))
    with torch.no_grad():
        right = made.mixture.predict(part.images.float() / 255) == part.labels
    assert float(right.float().mean()) == pytest.approx(made.numbers["clean"])


def test_the_frontier_trades_one_for_the_other(made: Fit) -> None:
    points = made.mixture.frontier
    assert len(points) >= 2
    assert all(a.lose_at_most < b.lose_at_most and a.clean < b.clean for a, b in pairwise(points))
    assert points[0].clean > made.numbers["robust_clean"]
    slid = made.mixture.with_target(100 * points[0].lose_at_most)
    assert slid.alpha == pytest.approx(points[0].alpha) and slid.fitted is not None
    assert slid.fitted.promise.startswith(f"loses at most {100 * points[0].lose_at_most:.3g} points of robust accuracy")
    assert slid.fitted.images == ("100-299",)


def test_rows_and_arrays_tell_the_story(made: Fit) -> None:
    rows = artifacts.rows(made)
    assert len(rows) == 4 * 200 and {row["half"] for row in rows} == {"choose", "promise"}
    kept = {(m, a): sum(r["correct"] for r in rows if (r["model"], r["attack"]) == (m, a))
            for m in ("robust", "mixed") for a in ("clean", "minimum-margin")}
    assert kept["mixed", "clean"] > kept["robust", "clean"]
    assert kept["robust", "minimum-margin"] - 20 <= kept["mixed", "minimum-margin"] <= kept["robust", "minimum-margin"]
    held = artifacts.arrays(made)
    assert str(held["nuts_landscape_of"]) in held["nuts_kinds"].tolist() and len(held["nuts_kinds_worth"]) == 3
    assert held["nuts_landscape"].shape == (8, 8, 8) and held["nuts_chosen"].shape == (5,)
    assert held["nuts_clean_before"].shape == held["nuts_clean_after"].shape == (200,)
    assert held["nuts_curve_nuts"].shape[1] == held["nuts_curve_plain"].shape[1] == 2


def test_cached_logits_stand_in_for_the_attack() -> None:
    kept: list[Cache] = []
    first = fit(*_pair(), _data(), threat=THREAT, target=beta(0.8), settings=SETTINGS, keep=kept.append)
    again = fit(*_pair(), _data(), threat=THREAT, target=beta(0.8), settings=SETTINGS, cache=kept[0])
    assert again.numbers == first.numbers and "20 % of the images that the robust model keeps" in first.promise


def test_against_the_pair() -> None:
    pair = fit(*_pair(), _data(), threat=THREAT, target=lose_at_most(10.0),
               settings=dataclasses.replace(SETTINGS, against="pair", rule="nuts"))
    assert pair.helped and pair.cache.said is not None and "both models at once" in pair.promise


def test_the_map_of_a_similar_mixture() -> None:
    like = LogitMap(2.0, 1.5, -0.3, rivals=0.5)
    told = fit(*_pair(), _data(), threat=THREAT, target=lose_at_most(10.0),
               settings=dataclasses.replace(SETTINGS, like=like))
    assert told.mixture.logit_map is not None and told.mixture.logit_map.facts() == like.facts()


def test_an_accurate_model_that_only_names_classes() -> None:
    accurate, robust = _pair()
    told = fit(HardLabels(lambda x: accurate(x).argmax(1)), robust, _data(), threat=THREAT, target=lose_at_most(10.0),
               settings=SETTINGS)
    full = fit(accurate, robust, _data(), threat=THREAT, target=lose_at_most(10.0), settings=SETTINGS)
    assert told.numbers == full.numbers
    assert "nuts_curve_plain" not in artifacts.arrays(told)


def test_a_robust_model_without_gradients() -> None:
    told = fit(*_pair(NoGradients), _data(60), threat=THREAT, target=lose_at_most(20.0),
               settings=FitSettings(strength=AttackStrength(steps=1, targets=1, pool=1), rounds=0))
    assert any("random search" in note for note in told.notes)


def test_without_gradients_every_round_is_random_search_also_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:

    used: list[object] = []

    def watched(*arguments: Any, **settings: Any) -> Any:
        used.append(settings["gradient_free"])
        return minimum_margin(*arguments, **settings)

    monkeypatch.setattr(margin_attack, "minimum_margin", watched)
    kept: list[Cache] = []
    settings = FitSettings(strength=AttackStrength(steps=1, targets=1, pool=1), rounds=1)
    for cache in (None, kept):
        told = fit(*_pair(NoGradients), _data(60), threat=THREAT, target=lose_at_most(20.0), settings=settings,
                   keep=kept.append, cache=cache[0] if cache else None)
        assert any("random search" in note for note in told.notes)
    assert len(used) == 4 and all(used)


def test_classes_of_any_whole_type() -> None:
    accurate, robust = _pair()
    told = fit(_Told(lambda x: accurate(x).argmax(1).int()), robust, _data(), threat=THREAT,
               target=lose_at_most(10.0), settings=SETTINGS)
    with torch.no_grad():
        assert told.mixture(_data(4).images.float() / 255).shape == (4, 4)


def test_no_mixture_helps() -> None:
    accurate, robust = _pair()
    told = fit(accurate, robust, _data(), threat=THREAT, target=lose_at_most(0.5), settings=SETTINGS)
    assert not told.helped and told.mixture.alpha == 1.0
    assert "100 images are too few to promise 0.5 points" in told.promise
    worse = fit(Linear(-accurate.weight.detach()), robust, _data(), threat=THREAT, target=lose_at_most(10.0),
                settings=SETTINGS)
    assert not worse.helped and not worse.mixture.frontier and worse.numbers["clean"] == worse.numbers["robust_clean"]
    x = _data().images.float() / 255
    with torch.no_grad():
        assert torch.equal(told.mixture.predict(x), robust(x).argmax(1))


class _Told(nn.Module):
    def __init__(self, answer: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> object:
        return self.answer(x)


def _nan(model: nn.Module) -> nn.Module:
    nn.init.constant_(model.weight, torch.nan)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g, h: (g, g), "`accurate and robust` must be different models, got 'equal weights'"),
        (lambda g, h: (g, Linear(torch.randn(5, 48))), r"equal numbers of classes, got \(4, 5\)"),
        (lambda g, h: (g, _nan(h)), "the robust model must answer with finite logits"),
        (lambda g, h: (_nan(g), h), "the accurate model must answer with finite logits"),
        (lambda g, h: (g, Linear(-g.weight.detach())), "right on at least one attacked image"),
        (lambda g, h: (g, Linear(2 * g.weight.detach())), "must differ, got the same answer on all 200 images"),
        (lambda g, h: (g, _Told(lambda x: h(x).argmax(1))), r"`robust` must answer with logits \(B, K\), got 'shape"),
        (lambda g, h: (_Told(lambda x: x), h), r"`accurate` must answer with logits \(B, K\) or classes \(B,\)"),
        (lambda g, h: (_Told(lambda x: g(x).tolist()), h), "`accurate` must answer with one tensor, got 'list'"),
        (lambda g, h: (_Told(lambda x: x[9999]), h), r"`accurate` must take images of shape \(3, 4, 4\), but raised"),
        (lambda g, h: (_Told(lambda x: g(x).argmax(1) + 4), h), "`classes of the accurate model` must lie in 0..3"),
        (lambda g, h: (_Told(lambda x: g(x).amax(1)), h), "`classes of the accurate model` must be whole numbers"),
    ],
)
def test_one_sentence(change: Callable[[Linear, Linear], tuple[nn.Module, nn.Module]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        fit(*change(*_pair()), _data(), threat=THREAT, settings=SETTINGS)
