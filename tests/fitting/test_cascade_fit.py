"""The fit of a cascade: its two stages, its attacks, and the command as a function."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_pair import THREAT, make_attack, make_data, make_pair
from synthetic_cascade import BUDGET, VIEWS, OneSwitch, population, with_first_view
from synthetic_logits import make_logits
from torch import Tensor, nn

import equipoise as eq
from equipoise import models
from equipoise.attacks import Attack
from equipoise.core.checks import InputError
from equipoise.core.promises import Target
from equipoise.core.results import read_summary
from equipoise.data import pixels
from equipoise.fitting import FitSettings, artifacts, cascade
from equipoise.fitting.cascade import (
    SCALES,
    CascadeCalibration,
    StageMargins,
    fit_cascade,
    select_cascade,
    select_first_q,
)
from equipoise.fitting.conformal import lose_at_most, threshold
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.pipeline import CalibratedMixture
from equipoise.mixing import CascadedClassifier
from equipoise.mixing.cascade import FirstView
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.mixing.provenance import halves
from equipoise.models import checkpoint
from equipoise.models.layers.tta import TTAClassifier

QUICK = FitSettings(rule="cascade", views=6, rounds=1, steps=4, targets=2, pool=2)


def test_margins_by_their_definition() -> None:
    logits = with_first_view(make_logits(40))
    first_q, q, views_map, first_map = 0.35, 0.3, confidence_switch(1.5), confidence_switch(0.8)
    margins = StageMargins.of(logits, replace(OneSwitch().select(Target(0.1)), first_scale=0.8))
    rows = logits.survived.nonzero().squeeze(1).tolist()
    worst = margins.worst(torch.tensor([first_q]))[0]
    assert logits.first is not None and logits.first_attacked is not None
    kept = []
    for row in rows:
        keeps = True
        for first, mean in zip(logits.first_attacked[:, row], logits.attacked[:, row], strict=True):
            p, p_first = (
                torch.softmax(own(z.unsqueeze(0)), 1)[0]
                for own, z in ((views_map, mean), (first_map, first))
            )
            label, top, top_first = int(logits.labels[row]), p.sort().values, p_first.sort().values
            if top_first[-1] - top_first[-2] > first_q:
                keeps &= int(p_first.argmax()) == label
            else:
                keeps &= int(p.argmax()) == label and bool(top[-1] - top[-2] > q)
        kept.append(keeps)
    assert (worst > q).tolist() == kept and 0 < sum(kept) < len(kept)
    passes = float(margins.passes(torch.tensor([first_q]), 6))
    assert passes == pytest.approx(
        1 + 5 * float((margins.first.clean.abs() <= first_q).float().mean())
    )


@pytest.mark.parametrize("count", [60, 140, 300, 301])
def test_a_cascade_that_follows_the_robust_model_is_not_more_accurate(count: int) -> None:
    logits, target, search = with_first_view(make_logits(count)), Target(0.08), OneSwitch()
    calibration = CascadeCalibration(search, logits, target, search.select(target))  # type: ignore[arg-type]
    margins = StageMargins.of(calibration.logits, search.select(target))
    assert (
        float(margins.clean(torch.tensor([1.0]), torch.tensor([-1.0]))) == calibration.robust_clean
    )


def test_the_selected_threshold_keeps_the_passes_where_it_can() -> None:
    switch, losses = OneSwitch().select(Target(0.08)), 160
    whole = StageMargins.of(with_first_view(make_logits(2000), noise=0.1), switch)
    (cheap, low), (dear, high) = (select_first_q(whole, losses, 6, budget) for budget in (2.0, 6.0))
    passes = whole.passes(torch.tensor([cheap, dear]), 6)
    assert passes[0] <= 2.0 < passes[1]
    worst = whole.worst(torch.tensor([cheap, dear]))
    clean = whole.clean(torch.tensor([cheap, dear]), threshold(worst, losses))
    assert clean[1] > clean[0] and int((worst < 0).sum(dim=1).max()) <= losses / 2
    assert (low, high) == pytest.approx(clean.tolist(), abs=1e-4)
    # A first view that is weak under attack is seldom sure, whatever that costs, and without any
    # loss allowed never.
    all_of_them = StageMargins.of(population(), switch)
    weak, score = select_first_q(all_of_them, 10, 6, 2.0)
    passes = all_of_them.passes(torch.tensor([weak]), 6)
    assert score == pytest.approx(-float(passes)) and passes > 5
    assert int((all_of_them.worst(torch.tensor([weak])) < 0).sum()) <= 5
    assert select_first_q(all_of_them, -1, 6, 2.0) == (1.0, -torch.inf)


def test_each_stage_gets_the_scale_that_is_best_for_the_cascade() -> None:
    """The first view has the logits of all views at another temperature for each class: two scales
    are needed."""
    logits, target = with_first_view(make_logits(1000), noise=0.1), Target(0.08)
    assert logits.first is not None and logits.first_attacked is not None
    logits = replace(logits, first=4 * logits.first, first_attacked=4 * logits.first_attacked)
    search: Any = OneSwitch(scale=12.0)  # far too steep for either
    selected = select_cascade(search, logits, target, VIEWS, BUDGET)
    assert (
        selected is not None and selected.first_q is not None and selected.first_scale is not None
    )
    half = logits.halves(0)[0]
    losses, first_q = target.allowed(len(half), 0), torch.tensor([selected.first_q])
    margins = StageMargins.of(half, selected)
    best = float(margins.clean(first_q, threshold(margins.worst(first_q), losses)))
    assert float(margins.passes(first_q, VIEWS)) <= BUDGET
    scores = {
        (s, first): select_first_q(
            StageMargins.of(
                half,
                replace(
                    selected,
                    candidate=torch.tensor([12 * s, 1.0, 0.0], dtype=torch.float64),
                    first_scale=12 * first,
                ),
            ),
            losses,
            VIEWS,
            BUDGET,
        )[1]
        for s in SCALES
        for first in SCALES
    }
    assert best == pytest.approx(max(scores.values()), abs=1e-4) and best > scores[1.0, 1.0] + 0.01


def test_curves_of_the_report_have_no_point_that_loses_more_than_it_says() -> None:
    logits, target = with_first_view(make_logits(140), noise=0.3), Target(0.08)
    search: Any = OneSwitch()
    calibration = CascadeCalibration(
        search, logits, target, replace(search.select(target), first_q=0.3)
    )
    assert calibration.selected is not None
    worst = StageMargins.of(calibration.logits, calibration.selected).worst(torch.tensor([0.3]))
    by_first = int((worst < 0).sum())
    fit: Any = SimpleNamespace(calibration=calibration)
    curve = artifacts.trade_off(fit)[0]
    assert curve is not None and by_first >= 3
    assert (curve[1:, 1] * calibration.count <= calibration.survived - by_first + 1e-6).all()
    assert all(point.lose_at_most * 70 >= by_first for point in calibration.frontier())


def test_the_reason_of_a_failure() -> None:
    logits, target = with_first_view(make_logits(300), noise=0.3), Target(0.02)
    search: Any = OneSwitch()
    weak = replace(search.select(target), first_q=0.0)
    assert "a sure first view loses" in str(
        CascadeCalibration(search, logits, target, weak).failure(None)
    )
    worse = replace(logits, accurate=(logits.labels + 1) % 6)
    assert "there is nothing to gain" in str(
        CascadeCalibration(search, worse, target, weak).failure(None)
    )


def fitted(
    settings: FitSettings = QUICK, lose: float = 12.0
) -> tuple[CascadedClassifier, CalibratedMixture]:
    accurate, robust = make_pair()
    fit = fit_cascade(
        make_attack(accurate, TTAClassifier(robust, 2), make_data(160), settings),
        lose_at_most(lose),
    )
    assert isinstance(fit.mixture, CascadedClassifier), fit.summary.promise
    return fit.mixture, fit


def test_the_fit_attacks_both_stages_and_keeps_its_promise_on_its_points() -> None:
    mixture, fit = fitted()
    logits = fit.calibration.all_logits
    calibration = logits.halves(0)[1]
    assert (
        logits.first_attacked is not None and logits.first_attacked.shape == logits.attacked.shape
    )
    side = mixture.robust_side(*(z.reshape(-1, 4) for z in calibration.attacked_outputs))
    p = side.exp().view(*calibration.attacked.shape)
    own = p.gather(2, calibration.labels.view(1, -1, 1).expand(len(p), -1, 1)).squeeze(2)
    others = p.scatter(2, calibration.labels.view(1, -1, 1).expand(len(p), -1, 1), -1.0).amax(dim=2)
    lost = ((own - others) <= mixture.q).any(dim=0) & calibration.survived
    assert int(lost.sum()) <= lose_at_most(12.0).allowed(len(calibration), 0)
    assert mixture.method == "cascade of views" and mixture.frontier
    # The passes of the summary, at the clean images and at the most expensive points.
    assert calibration.first is not None and calibration.first_attacked is not None
    sure = [
        mixture.is_sure(mixture.map_first(z))
        for z in (calibration.first, *calibration.first_attacked)
    ]
    assert fit.summary.passes == pytest.approx(2 - float(sure[0].double().mean()))
    assert fit.summary.attacked_passes == pytest.approx(
        2 - float(torch.stack(sure[1:]).all(0).double().mean())
    )


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_last_attack_is_on_the_cascade_of_the_fit(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked: list[tuple[Any, bool]] = []
    selections = itertools.count()
    run_on = MarginAttack.run_on

    def select(*args: Any) -> Any:  # another threshold every time
        selected = select_cascade(*args)
        return (
            None if selected is None else replace(selected, first_q=0.8 + 0.02 * next(selections))
        )

    def record(self: MarginAttack, model: nn.Module, attack: Attack, *, skip_broken: bool) -> Any:
        attacked.append((model, skip_broken))
        return run_on(self, model, attack, skip_broken=skip_broken)

    monkeypatch.setattr(MarginAttack, "run_on", record)
    monkeypatch.setattr(cascade, "select_cascade", select)
    mixture, _ = fitted(replace(QUICK, rounds=rounds))
    assert (
        isinstance(attacked[0][0], FirstView) and not attacked[0][1]
    )  # a wrong class is not yet a sure one
    models = [model.mixture for model, _ in attacked[1:]]
    assert len(models) == rounds + 1
    first_stage = mixture.first_q, mixture.first_scale
    assert (
        models[-1].first_q,
        models[-1].first_scale,
    ) == first_stage and mixture.logit_map is not None
    assert models[-1].logit_map.settings == mixture.logit_map.settings
    assert mixture.frontier
    for point in mixture.frontier:  # each has a promise of its own, so each must have been attacked
        assert (point.first_q, point.first_scale) == first_stage
        assert point.logit_map().settings == mixture.logit_map.settings


class Brightness(nn.Module):
    """Two classes by the mean of an image, and by right half minus left half, of which two views
    together see none."""

    def __init__(self, mean: float, difference: float, corner: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([mean, difference, corner]))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., :2].mean(dim=(1, 2, 3)), x[..., 2:].mean(dim=(1, 2, 3))
        score = (
            torch.stack([(left + right) / 2 - 0.5, right - left, x[:, 0, 0, 0] - 0.5]).T
            @ self.weights
        )
        return torch.stack([score, -score, score * 0 - 30], dim=1)


def test_a_first_view_that_an_attack_makes_sure_of_a_wrong_class_never_decides() -> None:
    """All views together keep their class in the ball, and the first view predicts the same on
    images of its own."""
    half = torch.randint(
        0, 256, (160, 3, 4, 2), generator=torch.Generator().manual_seed(4), dtype=torch.uint8
    )
    images = torch.cat([half, half.flip(3)], dim=3)
    accurate, robust = Brightness(300.0, 0.0, 50.0), Brightness(20.0, 1000.0)
    with torch.no_grad():
        labels = accurate(pixels(images)).argmax(dim=1)
    data = eq.Dataset("halves", "test", images, labels, torch.arange(160), tuple("abc"))
    settings = replace(QUICK, views=2, passes=1.5)
    fit = fit_cascade(
        make_attack(accurate, TTAClassifier(robust, 2), data, settings), lose_at_most(12.0)
    )
    assert not isinstance(fit.mixture, CascadedClassifier) or fit.mixture.first_q == 1.0
    assert any("2 passes of the robust model per clean image" in note for note in fit.summary.notes)


@pytest.fixture
def bases(tmp_path: Path) -> tuple[str, str]:
    """Two small networks in files; the robust one is the accurate one with noise in its last
    layer."""
    x = pixels(shifted_images())
    model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=5).eval()
    fc = model.fc
    assert isinstance(fc, torch.nn.Linear)
    with torch.no_grad():
        fc.weight.mul_(20)
        fc.bias.sub_(model(x).mean(0))
        checkpoint.save(tmp_path / "accurate.safetensors", model)
        fc.weight.add_(
            0.3
            * fc.weight.std()
            * torch.randn(fc.weight.shape, generator=torch.Generator().manual_seed(2))
        )
        checkpoint.save(tmp_path / "robust.safetensors", model)
    return f"file:{tmp_path}/accurate.safetensors", f"file:{tmp_path}/robust.safetensors"


def shifted_images() -> Tensor:
    return torch.randint(
        0, 256, (120, 3, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )


def test_as_a_function_with_a_folder(bases: tuple[str, str], tmp_path: Path) -> None:
    accurate = eq.load_model(bases[0])
    with torch.no_grad():
        labels = accurate(pixels(shifted_images())).argmax(1)
    data = eq.Dataset("random", "test", shifted_images(), labels, torch.arange(120), tuple("abcd"))
    settings: dict[str, Any] = {
        "threat": THREAT,
        "lose_at_most": 20.0,
        "rule": "cascade",
        "views": 2,
        "steps": 3,
        "targets": 2,
        "pool": 1,
        "rounds": 1,
        "device": "cpu",
    }
    fit = eq.fit(*bases, data, out=tmp_path / "M", **settings)
    assert fit.helped and isinstance(fit.mixture, CascadedClassifier), str(fit)
    assert "passes of the robust model per clean image" in str(fit)
    loaded = eq.load_model(f"mixture:{tmp_path / 'M'}")
    assert isinstance(loaded, CascadedClassifier) and loaded.describe() == fit.mixture.describe()
    summary = read_summary(tmp_path / "M")
    assert (
        summary.fit is not None
        and summary.fit.rule == "cascade"
        and summary.costs[-1].robust_passes is not None
    )
    assert summary.costs[-1].robust_passes == pytest.approx(summary.fit.passes)
    assert (
        1 <= summary.costs[-1].robust_passes <= 2
        and "tta:2:" in (tmp_path / "M" / "mixture.toml").read_text()
    )
    with torch.no_grad():
        predicted = loaded(pixels(data.images)).argmax(1)
    clean = summary.result("mixed", "clean")
    assert clean.n == 60 and torch.equal(loaded.predict(data.images), predicted)
    calibration = halves(data.index, 0)[1]
    assert clean.count == int((predicted == labels)[calibration].sum())
    eq.fit(
        *bases, data, out=tmp_path / "M", passes=2.6, **settings
    )  # the default: the folder of the same fit
    again = eq.fit(*bases, data, out=tmp_path / "again", **settings)
    assert again.mixture.describe() == fit.mixture.describe()
    with_views = eq.fit(bases[0], f"tta:2:{bases[1]}", data, **settings)
    assert with_views.mixture.describe() == fit.mixture.describe()
    with pytest.raises(InputError, match="`views` must be 2, those of the robust model"):
        eq.fit(bases[0], f"tta:2:{bases[1]}", data, **{**settings, "views": 6})


def test_settings_that_a_cascade_has_not_are_refused() -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"views": 6}, "`views` must be left out unless `rule` is cascade"),
        ({"passes": 2.0}, "`passes` must be left out"),
        ({"rule": "cascade", "views": 3}, "`views` must be one of 2, 6, 10"),
        ({"rule": "cascade", "against": "pair"}, "`against` must be any"),
        ({"rule": "cascade", "passes": 0.5}, "`passes` must be at least 1"),
    ]
    for settings, message in mistakes:
        with pytest.raises(InputError, match=message):
            FitSettings(**settings)
