"""`--rule paper` from models to a mixture: what it returns, what it says, and how it differs from
the other rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_pair import QUICK, THREAT, Linear, NoGradients, make_attack, make_data, make_pair
from synthetic_logits import make_logits

from equipoise.core.checks import InputError
from equipoise.fitting import FitSettings, fit
from equipoise.fitting.conformal import beta, lose_at_most
from equipoise.fitting.margin_grid import MarginGrid
from equipoise.fitting.paper import PUBLISHED, algorithm_1
from equipoise.fitting.paper_fit import PaperFit, clean_predictions, fit_paper
from equipoise.fitting.pipeline import ReusedMap
from equipoise.fitting.search import MapSearch
from equipoise.mixing import HardLabels, LogitMap, MixedClassifier, Provenance

PAPER = dataclasses.replace(QUICK, rule="paper")


def paper_fit(
    target: Any = None, like: LogitMap | None = None, robust: type[Linear] = Linear, **settings: Any
) -> PaperFit:
    attack = make_attack(*make_pair(robust), settings=dataclasses.replace(PAPER, **settings))
    return fit_paper(attack, target or beta(0.9), like=None if like is None else ReusedMap(like))


@pytest.fixture(scope="module")
def fitted() -> PaperFit:
    return paper_fit(rounds=1)


def test_mixture_is_the_optimum_on_all_images(fitted: PaperFit) -> None:
    """One point per image, that of the smallest margin of the layer-normed model, and no half is
    held out."""
    logits = fitted.logits
    search = algorithm_1(
        logits.attacked[0, logits.survived],
        logits.clean[~logits.correct],
        0.9,
        PUBLISHED["cifar10"].axes(),
    )
    assert fitted.mixture.logit_map is not None
    own = fitted.mixture.logit_map.settings
    assert (own.scale, own.power, own.shift) == search.candidate and own.clamp == "gelu"
    assert fitted.mixture.alpha == pytest.approx(search.alpha, rel=1e-12) and fitted.mixture.hard
    assert (
        fitted.summary.objective == search.objective.min()
        and fitted.summary.q == search.q[search.best]
    )


def test_surrogate_alpha_is_that_of_the_unmapped_model(fitted: PaperFit) -> None:
    """Without layer norm or map, at the β of the published settings; not limited to 0.9."""
    logits = fitted.logits
    p = np.sort(torch.softmax(logits.attacked[0, logits.survived].double(), dim=1).numpy(), axis=1)
    q = np.quantile(p[:, -1] - p[:, -2], 0.05)
    assert fitted.mixture.surrogate_alpha == pytest.approx(1 / (1 + q), rel=1e-9)


def test_summary_and_record_name_the_rule(fitted: PaperFit) -> None:
    assert (fitted.summary.rule, fitted.summary.method) == ("paper", "MixedNUTS")
    assert fitted.mixture.provenance is not None and fitted.mixture.provenance.rule == "paper"
    assert fitted.mixture.method == "MixedNUTS" and not fitted.mixture.frontier
    assert fitted.summary.promise.endswith(
        "on its own 200 images, and promises nothing beyond them"
    )


def test_note_on_ties(fitted: PaperFit) -> None:
    assert (
        len(fitted.search.optima) > 1
        and (
            f"{len(fitted.search.optima)} candidates have the lowest objective; of these, one whose threshold is not "
            "saturated, if there is one, with the largest 1 − alpha"
        )
        in fitted.summary.notes
    )


def test_clean_accuracy_is_that_of_the_mixture(fitted: PaperFit) -> None:
    with torch.no_grad():
        predicted = fitted.mixture(make_data().images.float() / 255).argmax(1)
    assert fitted.summary.clean == pytest.approx(
        float((predicted == make_data().labels).float().mean())
    )


def test_objective_is_recomputed_under_an_attack_on_the_map(fitted: PaperFit) -> None:
    assert fitted.summary.recomputed_objective is not None
    assert any(
        "recomputed under an attack on the mapped model" in note for note in fitted.summary.notes
    )
    without = paper_fit(rounds=0)
    assert without.summary.recomputed_objective is None
    assert without.mixture.alpha == fitted.mixture.alpha, "the mixture does not depend on it"


def test_points_of_robust_accuracy_as_target() -> None:
    by_points = paper_fit(lose_at_most(5.0))
    survived = int(by_points.logits.survived.sum())
    assert by_points.mixture.alpha == pytest.approx(
        paper_fit(beta(1 - 0.05 * 200 / survived)).mixture.alpha
    )
    assert "5 points of robust accuracy are β = " in by_points.summary.notes[0]


def test_map_of_another_mixture_gets_its_own_alpha() -> None:
    published = PUBLISHED["cifar100"].logit_map()
    found = paper_fit(like=published)
    assert (
        found.mixture.logit_map is not None
        and found.mixture.logit_map.settings == published.settings
    )
    assert found.mixture.alpha != PUBLISHED["cifar100"].alpha
    notes = "\n".join(found.summary.notes)
    assert "for the reused map alone, without a search" in notes and "grid published" not in notes
    for other in (LogitMap(1.0, 1.0, 0.0, rivals=0.0), LogitMap(1.0, 1.0, 0.0, "gelu-monotone")):
        with pytest.raises(
            InputError, match="`like` must name a mixture with a map of the paper's form"
        ):
            paper_fit(like=other)


def test_only_maps_of_mixednuts_are_reused() -> None:
    """The images that selected them are recorded."""
    like, attack = PUBLISHED["cifar10"].logit_map(), make_attack(*make_pair(), settings=PAPER)
    with pytest.raises(InputError, match="fitted by rule paper, with rule paper, got 'nuts'"):
        fit_paper(
            attack,
            beta(0.9),
            like=ReusedMap(like, Provenance("random", "test", ("0-99",), rule="nuts")),
        )
    record = Provenance("random", "test", ("0-99",), rule="paper")
    own = fit_paper(attack, beta(0.9), like=ReusedMap(like, record)).mixture.provenance
    assert own is not None and own.overlap(make_data()) == ("100-299",)
    moved = dataclasses.replace(
        make_data(), images=255 - make_data().images, index=torch.arange(200)
    )
    assert own.overlap(moved) == ("0-99",)


def test_without_gradients() -> None:
    notes = paper_fit(robust=NoGradients).summary.notes
    assert "random search (Square)" in notes[0] and any(
        "queries of Square" in note for note in notes
    )


def test_conditional_objective() -> None:
    """Only the errors that the accurate model corrects count; here it corrects some of them."""
    attack = make_attack(*make_pair(), settings=dataclasses.replace(PAPER, objective="conditional"))
    accurate = HardLabels(
        lambda x: torch.where(x.flatten(1)[:, 0] > 0.5, make_pair()[0](x).argmax(1), 0)
    )
    found = fit_paper(dataclasses.replace(attack, accurate=accurate), beta(0.9))
    logits = found.logits
    errors = ~logits.correct & (logits.accurate == logits.labels)
    assert 0 < int(errors.sum()) < int((~logits.correct).sum())
    search = algorithm_1(
        logits.attacked[0, logits.survived], logits.clean[errors], 0.9, PUBLISHED["cifar10"].axes()
    )
    assert found.summary.objective == search.objective.min() and found.search.best == search.best


def test_conditional_objective_of_our_search() -> None:
    logits = make_logits(accuracy=0.6)
    search = MapSearch(logits, objective="conditional")
    family, table = next(iter(search.tables.items()))
    scored = search.score(lose_at_most(5.0), table)
    errors = (logits.clean.argmax(1) != logits.labels) & (logits.accurate == logits.labels)
    gaps = MarginGrid(logits, use_accurate=False).grid(family, *search.space.axes()).gaps
    expected = (gaps[:, errors] <= scored.q[:, None]).float().mean(1)
    assert torch.equal(scored.unfiltered_score, expected)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_of_the_accurate_side(temperature: float) -> None:
    found = paper_fit(accurate_temperature=temperature)
    x, (accurate, robust) = make_data().images.float() / 255, make_pair()
    assert found.mixture.logit_map is not None and not found.mixture.hard
    with torch.no_grad():
        p = (1 - found.mixture.alpha) * torch.softmax(
            accurate(x) / temperature, 1
        ) + found.mixture.alpha * torch.softmax(found.mixture.logit_map(robust(x)), 1)
        assert torch.allclose(found.mixture(x).exp(), p, atol=1e-6)
        assert torch.equal(found.mixture.predict(x), found.mixture(x).argmax(1))
    assert torch.equal(clean_predictions(found.mixture, found.logits), found.mixture.predict(x))
    assert found.mixture.alpha == paper_fit().mixture.alpha, (
        "the threshold holds for any accurate side"
    )


def test_temperature_needs_logits() -> None:
    attack = make_attack(
        *make_pair(), settings=dataclasses.replace(PAPER, accurate_temperature=0.5)
    )
    classes = HardLabels(lambda x: make_pair()[0](x).argmax(1))
    with pytest.raises(
        InputError, match="`accurate` must output logits if its temperature is not 0"
    ):
        fit_paper(dataclasses.replace(attack, accurate=classes), beta(0.9))


def test_notes_say_where_corrections_would_have_mattered() -> None:
    """GELU's dip reorders small logits: with p near 1 and a low c, the map changes classes."""
    found = paper_fit(beta(0.5), like=LogitMap(5.0, 1.0, -2.5, "gelu"))
    notes = "\n".join(found.summary.notes)
    assert (
        "the map changes the robust model's class on" in notes
        and "Other rules reject such maps" in notes
    )
    assert "alpha 1." not in notes, "a signed margin below 0 leaves the robust model alone"
    strict = "\n".join(paper_fit(beta(0.999)).summary.notes)
    assert "too few to promise 99.9 %" in strict
    assert "the conformal threshold of the other rules would be" in "\n".join(
        paper_fit().summary.notes
    )


def test_text_of_a_fit() -> None:
    result = fit(
        *make_pair(),
        make_data(),
        threat=THREAT,
        device="cpu",
        rule="paper",
        rounds=0,
        steps=4,
        targets=2,
    )
    lines = str(result).splitlines()
    assert lines[-2].startswith(
        "the mixture was fitted to keep 98.5 % of the robust model's attacked accuracy"
    )
    assert lines[0] == "Accuracy on the images that it was fitted on, which is optimistic"
    assert lines[-1].startswith("MixedNUTS, s=") and "LogitMap" not in lines[-1]
    assert "another --beta" in result.frontier_table()


def test_mixture_that_does_not_help_is_still_returned() -> None:
    """An accurate model that is wrong on every image gains nothing: other rules return the robust
    model alone."""
    accurate, robust = make_pair()
    found = fit_paper(
        make_attack(Linear(-accurate.weight.detach()), robust, settings=PAPER), beta(0.9)
    )
    assert (
        found.mixture.logit_map is not None
        and found.mixture.rule == "paper"
        and found.mixture.alpha < 1
    )
    assert not found.summary.helped and found.summary.clean <= found.summary.robust_clean


def test_published_numbers(tmp_path: Path) -> None:
    result = fit(*make_pair(), None, threat=THREAT, published="cifar100", accurate_temperature=0.5)
    mixture, own = result.mixture, PUBLISHED["cifar100"]
    assert (
        mixture.alpha == pytest.approx(own.alpha, rel=1e-14)
        and mixture.surrogate_alpha == own.surrogate_alpha
    )
    assert mixture.logit_map is not None and mixture.logit_map.settings == own.logit_map().settings
    assert mixture.accurate_temperature == 0.5 and mixture.method == "MixedNUTS"
    assert str(result).startswith(
        "MixedNUTS with the published LogitMap(s=0.6116, p=3.571, c=-2.143, clamp=gelu)"
    )


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("cifar10", "test", ("100-299",)),
        ("cifar100", "test", ("100-299",)),
        ("imagenet", "val", ()),
    ],
)
def test_images_that_selected_published_numbers(
    name: str, split: str, expected: tuple[str, ...]
) -> None:
    """The first 1000 test images of CIFAR; those of ImageNet are unknown."""
    images = dataclasses.replace(make_data(), name=name, split=split)
    published = fit(*make_pair(), None, threat=THREAT, published=name).mixture.provenance
    assert published is not None and published.overlap(images) == expected
    later = dataclasses.replace(images, index=images.index + 1000)
    assert published.overlap(later) == ()
    reused = fit(
        *make_pair(),
        later,
        threat=THREAT,
        device="cpu",
        rule="paper",
        rounds=0,
        steps=1,
        targets=1,
        like=f"published:{name}",
    )
    assert reused.mixture.provenance is not None and "margins by 1 step of APGD" in str(reused)
    other = dataclasses.replace(images, images=255 - images.images)
    assert reused.mixture.provenance.overlap(other) == expected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rule": "paper", "against": "pair"}, "`against` must be any with rule paper"),
        (
            {"rule": "paper", "objective": "mixture"},
            "`objective` must be surrogate or conditional with rule paper",
        ),
        ({"rule": "paper", "clamp": "gelu-monotone"}, "`clamp` must be one of the paper"),
        (
            {"rule": "nuts", "accurate_temperature": 0.5},
            "`accurate_temperature` must be 0 with this rule",
        ),
        (
            {"rule": "paper", "accurate_temperature": -1.0},
            "`accurate_temperature` must not be negative",
        ),
        ({"published": "cifar10", "beta": 0.9}, "`published` must come without a target"),
        ({"published": "cifar11"}, "did you mean 'cifar10'"),
    ],
)
def test_settings_that_the_rule_does_not_have(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FitSettings(**settings)


def test_defaults_of_the_rules() -> None:
    paper, ours = FitSettings(rule="paper"), FitSettings()
    assert paper.target().of_robust and paper.target().share == pytest.approx(0.015)
    assert (paper.search_objective, paper.search_clamp) == ("surrogate", "gelu")
    assert (ours.search_objective, ours.search_clamp) == ("mixture", "gelu-monotone")
    assert ours.accurate_side == paper.accurate_side == {"hard": True}
    assert FitSettings(alpha=0.5).accurate_side == {"hard": False, "accurate_temperature": 1.0}
    assert isinstance(
        fit(*make_pair(), None, threat=THREAT, alpha=0.5, accurate_temperature=0.0).mixture,
        MixedClassifier,
    )


def test_an_attack_on_the_mapped_model_leaves_the_map_where_its_logits_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the attack needs the map there, and the objective of the rule needs it with the
    cached logits."""
    moved, to = [], LogitMap.to

    def remembered(self: LogitMap, *arguments: Any, **more: Any) -> LogitMap:
        moved.append(self)
        return to(self, *arguments, **more)

    monkeypatch.setattr(LogitMap, "to", remembered)
    own = LogitMap(2.0, 1.0, 0.0, "linear")
    make_attack(*make_pair(Linear), settings=PAPER).run(own)
    assert moved and all(other is not own for other in moved)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["paper", "nuts", "switch"])
def test_every_rule_fits_on_a_gpu(rule: str) -> None:
    """With attacks on the mapped model too; the fit itself works on logits in main memory."""
    options = {**dataclasses.replace(QUICK, rule=rule, rounds=1).to_dict(), "beta": 0.9}
    accurate, robust = make_pair(Linear)
    fitted = fit(accurate, robust, make_data(), threat=THREAT, device="cuda", **options)
    assert (
        fitted.summary is not None and fitted.summary.rule == rule and 0 < fitted.summary.alpha <= 1
    )
