"""Suites: stages of nested suites, inherited settings, descriptions, and functions as attacks."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from attack_models import THREAT, BatchSizeDependent, ConvNet, HardDecision, make_data
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise.attacks import (
    Apgd,
    AttackState,
    Clean,
    Fab,
    FunctionAttack,
    Pgd,
    Square,
    Suite,
    TargetedApgd,
    TransferPgd,
    attack_dataset,
)
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat
from equipoise.data import pixels

SUITE = Suite((Apgd("margin", 9), TargetedApgd(12, (1,)), Fab(10, (1,)), Square(60)))


def _names(suite: Suite) -> list[str]:
    return [stage.name for stage in suite.stages()]


def test_stage_names_are_those_of_published_rows() -> None:
    suite = Suite(
        (
            Apgd("margin", 20),
            Apgd(restarts=2),
            TargetedApgd(20, (1, 3), "distance"),
            TargetedApgd(ranks=(2,)),
            Fab(30, (1,)),
            Square(100),
            Square(share=0.3, restarts=2),
            Pgd(),
        )
    )
    assert _names(suite) == [
        "apgd-margin@20",
        "apgd-ce",
        "apgd-ce-2",
        "targeted-1@20-distance",
        "targeted-3@20-distance",
        "targeted-2",
        "fab-1@30",
        "square@100",
        "square-0.3",
        "square-2-0.3",
        "pgd",
    ]


def test_stages_of_a_named_suite_have_a_prefix() -> None:
    inner = Suite((Apgd("ce", 30), Suite((Square(9),), name="deep")), name="hinges")
    assert _names(Suite((Apgd(), inner))) == [
        "apgd-ce",
        "hinges/apgd-ce@30",
        "hinges/deep/square@9",
    ]
    assert _names(Suite((Suite((Apgd(),)),))) == ["apgd-ce"], "a suite without a name adds none"


def test_members_inherit_what_they_do_not_have() -> None:
    surrogate, other = nn.Identity(), nn.Identity()
    extra, other_extra = torch.sum, torch.mean
    suite = Suite(
        (
            Apgd(),
            Apgd(steps=9, surrogate=other),
            Suite((Fab(ranks=(1,), extra=other_extra),)),
            Square(margin_ratio_below=0.5),
        ),
        surrogate=surrogate,
        extra=extra,
        follow="surrogate",
        margin_ratio_below=0.1,
    )
    stages = suite.stages()
    assert [stage.gradients.surrogate is surrogate for stage in stages] == [True, False, True, True]
    assert [stage.gradients.follow for stage in stages] == [
        "surrogate",
        "model",
        "surrogate",
        "surrogate",
    ]
    assert [stage.gradients.extra is extra for stage in stages] == [True, True, False, True]
    assert [stage.margin_ratio_below for stage in stages] == [0.1, 0.1, 0.1, 0.5]


@pytest.mark.parametrize("threat", [THREAT, Threat("l2", 0.1)], ids=str)
def test_a_nested_suite_gives_what_it_gives_as_one_function(threat: Threat) -> None:
    """Its stages have the random stream of its name, and gradients from its own surrogate."""
    model = ConvNet().eval()
    surrogate = copy.deepcopy(model)
    surrogate.head.weight.data += 0.01 * torch.randn(
        surrogate.head.weight.shape, generator=generator(0)
    )
    inner = Suite(
        (Apgd("ce", 10), TargetedApgd(8, (1,))),
        surrogate=surrogate,
        follow="surrogate",
        name="inner",
    )

    def function(
        model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **other: object
    ) -> Tensor:
        return replace(inner, name="")(model, x, y, threat=threat, stream=stream)

    def run(member: Suite | FunctionAttack) -> AttackState:
        return attack_dataset(
            Suite((member, Square(20))),
            model,
            make_data(model),
            threat=threat,
            seed=0,
            keep_images=True,
        )

    nested, called = run(inner), run(FunctionAttack("inner", function))
    assert nested.images is not None and called.images is not None
    assert torch.equal(nested.survived, called.survived) and torch.equal(
        nested.images, called.images
    )
    assert torch.equal(nested.margin, called.margin)
    assert {"inner/apgd-ce@10", None} <= {nested.broken_by(row) for row in range(37)}


def test_a_suite_on_a_batch_has_one_batch_size() -> None:
    """Otherwise an image would round differently when another one is broken."""
    model = BatchSizeDependent().eval()
    data = make_data(model, 8)
    model.batch_sizes.clear()
    x_adv = SUITE(
        model,
        pixels(data.images),
        data.labels,
        threat=Threat("linf", 0.02),
        stream=stream(0, "a", data.index),
    )
    assert set(model.batch_sizes) == {8}
    with torch.no_grad():
        assert 0 < int((model(x_adv).argmax(dim=1) != data.labels).sum()) < 8, "some finish early"


def test_a_function_can_be_a_stage() -> None:
    model, attacked = ConvNet().eval(), []

    def nothing(
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        threat: Threat,
        stream: Stream,
        surrogate: nn.Module | None,
        extra: object,
    ) -> Tensor:
        attacked.extend(stream.index.tolist())
        return x

    data = make_data(model)
    suite = Suite((Pgd(steps=5), FunctionAttack("nothing", nothing)))
    state = attack_dataset(suite, model, data, threat=THREAT, seed=0)
    assert set(attacked) == set(data.index[state.survived].tolist()), "on the images that survived"
    assert state.stages == ("pgd", "nothing") and {1} <= set(state.broken_stage.tolist()) <= {
        -1,
        0,
        1,
    }


def test_a_function_that_leaves_the_ball_is_an_error() -> None:
    def invert(model: nn.Module, x: Tensor, y: Tensor, **other: object) -> Tensor:
        return 1 - x

    model = Linear(
        torch.randn(6, 105, generator=generator(0)), torch.tensor([100.0, 0, 0, 0, 0, 0])
    )
    data = make_data(model)
    with pytest.raises(InputError, match="`invert` must stay within"):
        attack_dataset(FunctionAttack("invert", invert), model, data, threat=THREAT, seed=0)
    with pytest.raises(InputError, match="`invert` must stay within"):
        FunctionAttack("invert", invert)(
            model,
            pixels(data.images),
            data.labels,
            threat=THREAT,
            stream=stream(0, "a", data.index),
        )


def test_clean_is_an_attack_that_moves_nothing() -> None:
    model = ConvNet().eval()
    data = make_data(model)
    x = pixels(data.images)
    assert torch.equal(
        Clean()(model, x, data.labels, threat=THREAT, stream=stream(0, "a", data.index)), x
    )
    state = attack_dataset(Clean(), model, data, threat=THREAT, seed=0)
    assert state.stages == () and (~state.survived).nonzero().squeeze(1).tolist() == list(
        range(0, 37, 5)
    )


class Brightness:
    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1)

    def describe(self) -> dict[str, object]:
        return {"term": "brightness"}


def test_description_of_an_algorithm() -> None:
    assert Apgd("margin", 20).describe() == {
        "attack": "apgd",
        "version": 1,
        "loss": "margin",
        "steps": 20,
        "restarts": 1,
    }
    assert TargetedApgd(20, (1, 2), margin_ratio_below=0.1).describe() == {
        "attack": "targeted",
        "version": 1,
        "steps": 20,
        "ranks": [1, 2],
        "order": "logits",
        "margin_ratio_below": 0.1,
    }
    assert Pgd(extra=Brightness(), follow="surrogate").describe() == {
        "attack": "pgd",
        "version": 1,
        "steps": 20,
        "restarts": 1,
        "loss": "ce",
        "extra": {"term": "brightness"},
        "follow": "surrogate",
    }
    assert FunctionAttack("mine", torch.sum, {"strength": 2}).describe() == {
        "attack": "mine",
        "version": 1,
        "name": "mine",
        "settings": {"strength": 2},
    }


def test_description_of_a_suite_has_its_members() -> None:
    described = Suite((Clean(), Square(9)), name="pair").describe()
    assert described == {
        "attack": "suite",
        "version": 1,
        "name": "pair",
        "attacks": [Clean().describe(), Square(9).describe()],
    }


def test_description_tells_models_apart() -> None:
    one, two = ConvNet(), ConvNet()
    assert Apgd(surrogate=one).describe() != Apgd(surrogate=two).describe()
    assert TransferPgd(one).describe() != TransferPgd(two).describe()
    assert Apgd(surrogate=one).describe() == Apgd(surrogate=one).describe()
    with pytest.raises(InputError, match=r"have a describe\(\)"):
        Apgd(extra=lambda x: x.flatten(1).sum(1)).describe()


def test_a_hard_decision_is_broken_through_its_surrogate_in_a_suite(linear: Linear) -> None:
    """The suite's surrogate reaches the stages; without it they have no gradient."""
    model = HardDecision(linear.float())
    data = make_data(linear)
    suite = Suite((Apgd("ce", 10),))
    threat = Threat("linf", 0.05)
    without = attack_dataset(suite, model, data, threat=threat, seed=0)
    with_surrogate = attack_dataset(
        replace(suite, surrogate=linear), model, data, threat=threat, seed=0
    )
    assert int(with_surrogate.survived.sum()) < int(without.survived.sum())
