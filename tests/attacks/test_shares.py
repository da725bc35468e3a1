"""Several processes attack the same images: each image as one process would, and none does more than the others."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attack_models import ConvNet, make_data

from equipoise.attacks import (
    Apgd,
    AttackState,
    Fab,
    SearchResult,
    Shares,
    Square,
    Suite,
    TargetedApgd,
    attack_dataset,
)
from equipoise.core.threat import Threat
from simulated_processes import run_processes

SUITE = Suite((Apgd("margin", 4), TargetedApgd(6, (1, 2)), TargetedApgd(6, (3,), margin_ratio_below=0.7), Fab(8, (1,)),
               Square(20)))
COUNT, THREAT = 61, Threat("linf", 0.02)
SURVIVED = -1
COLUMNS = ("broken_stage", "predicted", "margin", "logit_margin", "clean_logit_margin", "passes", "next_stage")


def attack(processes: int, first: list[list[int]], known: AttackState | None = None) -> (
        tuple[list[AttackState], Counter[tuple[int, int]], list[list[torch.Tensor]]]):
    """The states of all processes, how often a stage met an image, and the shares at every deal by process."""
    torch.manual_seed(0)
    models, met = [ConvNet().eval() for _ in range(processes)], Counter[tuple[int, int]]()
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    data, dealt = make_data(models[0], COUNT), [list[torch.Tensor]() for _ in range(processes)]

    def work(rank: int) -> AttackState:
        own = torch.zeros(COUNT, dtype=torch.bool)
        own[first[rank]] = True
        shares = Shares(own)

        def on_result(number: int, result: SearchResult, state: AttackState) -> None:
            met.update((number, row) for row in result.rows.tolist())
            if not dealt[rank] or not torch.equal(dealt[rank][-1], shares.own):
                dealt[rank].append(shares.own.clone())

        return attack_dataset(SUITE, models[rank], data, threat=THREAT, seed=0, shares=shares, state=known,
                              on_result=on_result)

    return run_processes(processes, work), met, dealt


@pytest.fixture(scope="module")
def alone() -> tuple[AttackState, Counter[tuple[int, int]]]:
    states, met, _ = attack(1, [list(range(COUNT))])
    return states[0], met


@pytest.mark.parametrize("first", [
    [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))],
    [list(range(COUNT)), []],  # a process without images gets some before the second stage
    [[], list(range(5)), list(range(5, COUNT))],
], ids=["even", "one has all", "three"])
def test_every_image_is_attacked_once_and_as_by_one_process(
        first: list[list[int]], alone: tuple[AttackState, Counter[tuple[int, int]]]) -> None:
    expected, met_alone = alone
    states, met, _ = attack(len(first), first)
    for state in states:
        for name in COLUMNS:
            assert torch.equal(getattr(state, name), getattr(expected, name)), name
    assert met == met_alone and set(met.values()) == {1}
    assert {SURVIVED, 0, 1} <= set(expected.broken_stage.tolist()), "some survive, others do not"


def test_survivors_are_dealt_out_evenly_also_those_that_are_near_to_breaking(
        alone: tuple[AttackState, Counter[tuple[int, int]]]) -> None:
    """All survivors begin in one process, and the images with the smaller margins in the other."""
    expected, _ = alone
    order = expected.margin_ratio.argsort().tolist()
    _, _, dealt = attack(2, [order[:30], order[30:]])
    last = [shares[-1] & expected.survived for shares in dealt]
    assert abs(int(last[0].sum()) - int(last[1].sum())) <= 1 and int(last[0].sum()) > 5
    ratios = [expected.margin_ratio[own].sort().values for own in last]
    near = expected.margin_ratio[expected.survived].median()
    assert abs(sum(int((ratio <= near).sum()) * sign for ratio, sign in zip(ratios, (1, -1), strict=True))) <= 2


@pytest.mark.parametrize("stage", [1, 3])
def test_images_that_are_further_than_others_resume(
        stage: int, alone: tuple[AttackState, Counter[tuple[int, int]]]) -> None:
    """A killed run knows much of some images and nothing of others."""
    expected, _ = alone
    known = AttackState.new(expected.stages, COUNT)
    rows = ((expected.broken_stage != SURVIVED) & (expected.broken_stage <= stage)).nonzero().squeeze(1)[::2]
    known.put(rows, expected.take(rows))
    states, met, _ = attack(2, [list(range(0, COUNT, 3)), [row for row in range(COUNT) if row % 3]], known)
    for state in states:
        assert all(torch.equal(getattr(state, name), getattr(expected, name)) for name in COLUMNS)
    assert not {row for _, row in met} & set(rows.tolist()) and set(met.values()) == {1}
