"""Attacks that know how a mixture is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_gates import SteepGate, gated, gated_over_map, labelled_digits
from torch import nn

from equipoise.attacks import Apgd, Pgd, Square, Suite
from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.core.threat import Threat
from equipoise.evaluation.adaptive import HardLabelWrapper, adaptive_attacks, white_box, with_logits
from equipoise.evaluation.plan import EvaluationPlan
from equipoise.mixing import AlphaPenalty, LogitMap, MixedClassifier

SUITE = Suite(attacks=(Apgd(loss="margin", steps=5), Square(queries=20)))


def test_a_suite_also_attacks_both_sides_of_plain_mixing() -> None:
    model = gated()
    plain, *alone = (
        MixedClassifier(model.accurate, model.robust, alpha) for alpha in (0.7, 0.0, 1.0)
    )
    attacks = adaptive_attacks(plain, SUITE)
    assert set(attacks) == {"adaptive"} and attacks["adaptive"].surrogate is None
    names = [stage.name for stage in attacks["adaptive"].stages()]
    assert names[0] == "apgd-margin@5" and names[-1] == "square@20"
    assert all(name.startswith("hinges/") for name in names[1:-1]) and "hinges/mapped-1@5" in names
    assert [
        adaptive_attacks(*pair) for pair in ((plain, Pgd()), (alone[0], SUITE), (alone[1], SUITE))
    ] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("adaptive", "source", "names"),
    [
        (["surrogate"], "mix", {"adaptive"}),
        ([], "mix", {"suite"}),
        (["own-gradients"], "mix", {"suite"}),
        (["surrogate", "own-gradients"], "mix", {"suite", "adaptive"}),
        (["through"], "mix", {"suite"}),
        (["surrogate"], "std", {"suite", "adaptive"}),
    ],
)
def test_which_attacks_an_evaluation_of_plain_mixing_runs(
    adaptive: list[str], source: str, names: set[str]
) -> None:
    model = gated()
    plain = MixedClassifier(model.accurate, model.robust, 0.7)
    assert attacks_of(plain, adaptive, source) == {"clean"} | names


def test_attacks_straight_through_a_map_do_not_replace_its_own_gradients() -> None:
    model = gated()
    mapped = MixedClassifier(
        model.accurate, model.robust, 0.7, logit_map=LogitMap(1.0, 1.0, 0.0), hard=True
    )
    assert attacks_of(mapped, ["through"]) == {"clean", "suite", "adaptive-through"}
    assert attacks_of(mapped, ["surrogate", "through"]) == {"clean", "adaptive", "adaptive-through"}


def attacks_of(model: MixedClassifier, adaptive: list[str], source: str = "mix") -> set[str]:
    """Names of the attacks on a mixture in an evaluation with one suite."""
    plan = EvaluationPlan(
        {"mixed": model},
        labelled_digits(model, 2),
        {"suite": SUITE},
        norm="linf",
        audit=None,
        source=source,
        adaptive=adaptive,
        stand_in=None,
        device=torch.device("cpu"),
    )
    return {job.attack_name for job in plan.jobs if job.name == "mixed"}


def test_hidden_gradients_come_from_the_surrogate_and_both_sides_are_attacked() -> None:
    model = gated()
    hard = MixedClassifier(model.accurate, model.robust, 0.7, hard=True)
    attacks = adaptive_attacks(hard, SUITE, ("surrogate", "through"))
    assert set(attacks) == {"adaptive", "adaptive-through"}
    suite = attacks["adaptive"]
    assert isinstance(suite, Suite) and suite.surrogate is not None
    names = [stage.name for stage in suite.stages()]
    assert (
        names[0] == "apgd-margin@5" and names[-1] == "square@20" and names[1].startswith("hinges/")
    )


@pytest.mark.parametrize("over_map", [False, True])
def test_a_gate_is_also_attacked_with_a_term_that_lowers_alpha(over_map: bool) -> None:
    model = gated_over_map() if over_map else gated()
    attacks = adaptive_attacks(model, SUITE)
    assert set(attacks) == {"adaptive", "adaptive-lowered"} and attacks["adaptive"].extra is None
    assert isinstance(attacks["adaptive-lowered"].extra, AlphaPenalty)
    for attack in attacks.values():
        assert "hinges/mapped-1@5" in [stage.name for stage in attack.stages()]
    assert attacks_of(model, ["surrogate"]) == {"clean", "adaptive", "adaptive-lowered"}


def test_a_single_attack_on_a_gate_over_plain_mixing_is_repeated_with_that_term() -> None:
    assert set(adaptive_attacks(gated(), Pgd())) == {"adaptive-lowered"}


def test_attacks_on_one_batch_keep_their_algorithm() -> None:
    assert isinstance(adaptive_attacks(gated_over_map(), Pgd())["adaptive"], Pgd)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"did you mean 'through'\?"):
        adaptive_attacks(gated(), SUITE, ("trough",))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_steep_gate_does_not_hide_its_gradient(lowered: bool) -> None:
    base = gated()
    model = SteepGate(base.accurate, base.robust, base.network, scale=1000.0, shift=0.0).eval()
    x, y = torch.full((2, 1, 8, 8), 0.7), torch.zeros(2, dtype=torch.long)
    threat, numbers = Threat("linf", 0.3), stream(0, "steep", torch.arange(2))
    plain = Suite(attacks=(Apgd(loss="margin", steps=10),))
    attacked = plain(model, x, y, threat=threat, stream=numbers)
    assert (model(attacked).argmax(dim=1) == 0).all(), "its own gradient is flat"
    attack = (
        replace(plain, extra=AlphaPenalty(model))
        if lowered
        else white_box(model, plain, both_sides=[Apgd(loss="ce", steps=10)])
    )
    assert (model(attack(model, x, y, threat=threat, stream=numbers)).argmax(dim=1) == 1).all()


def test_only_a_steep_gate_gets_a_gentle_surrogate() -> None:
    def members(scale: float) -> set[str]:
        attack = white_box(gated().with_range(0.0, 1.0, scale=scale), SUITE)
        return {stage.name.split("/")[0] for stage in attack.stages() if "/" in stage.name}

    assert members(2.0) == {"hinges"} and members(20.0) == {"gentle", "hinges"}


def test_a_model_that_returns_classes_gets_logits() -> None:
    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, 0].long()

    wrapped = with_logits("accurate", Classes(), 3, torch.zeros(1, 1, 2, 2))
    assert isinstance(wrapped, HardLabelWrapper)
    assert wrapped(torch.ones(2, 1, 2, 2)).tolist() == [[-1, 1, -1]] * 2
    plain = nn.Flatten()
    assert with_logits("accurate", plain, 4, torch.zeros(1, 1, 2, 2)) is plain


def test_the_probe_for_classes_hides_no_error() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no image suits me")

    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, 0]

    image = torch.zeros(1, 1, 2, 2)
    with pytest.raises(InputError, match=r"`accurate` .* raised ValueError: no image suits me"):
        with_logits("accurate", Raises(), 3, image)
    scores = Scores()
    assert with_logits("accurate", scores, 3, image) is scores, (
        "one real number per image is no class"
    )
