"""Two and three classes, where fewer targets exist than attacks ask for: verdicts against brute
force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import (
    Attack,
    AttackState,
    Fab,
    SearchResult,
    TargetedApgd,
    attack_dataset,
    fast,
)
from equipoise.core.rng import stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

THREAT = Threat("linf", 0.02)
COUNT = 48


class Pieces(nn.Module):
    """Class 0 has a logit of 0, every other class the largest of several linear functions.

    So an image of class 0 can be broken exactly if one of the functions can be raised above 0 in
    the ball, which is a linear problem of its own, with the solution eps·‖w‖₁ where the ball lies
    inside [0, 1].
    """

    def __init__(self, num_classes: int, pieces: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(num_classes)
        functions = (num_classes - 1) * pieces
        weight = torch.randn(num_classes - 1, pieces, 48, generator=generator)
        weight[1:] *= (
            1.6  # so that the class with the highest logit is not always the one that is easiest to reach
        )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(
            -0.8 - 0.25 * functions - weight.sum(dim=2) / 2, requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        values = torch.einsum("kpd,bd->bkp", self.weight.to(x.dtype), x.flatten(1)) + self.bias
        return torch.cat([x.new_zeros(len(x), 1), values.amax(dim=2)], dim=1)

    def data(self) -> Dataset:
        """Images of class 0 in the middle of the pixel range."""
        x = stream(0, "pieces", torch.arange(400)).uniform(3, 4, 4, low=0.3, high=0.7)
        images = (x * 255).round().to(torch.uint8)
        images = images[self(pixels(images)).argmax(dim=1) == 0][:COUNT]
        return Dataset(
            "pieces",
            "test",
            images,
            torch.zeros(len(images), dtype=torch.int64),
            torch.arange(len(images)),
            tuple(map(str, range(len(self.weight) + 1))),
        )

    def breakable(self, data: Dataset) -> Tensor:
        """(N, K − 1) whether each other class can win."""
        values = (
            torch.einsum("kpd,bd->bkp", self.weight, pixels(data.images).flatten(1)) + self.bias
        )
        return (values + THREAT.eps * self.weight.abs().sum(dim=2) > 0).any(dim=2)


@pytest.mark.parametrize(
    "attack", [TargetedApgd(40), Fab(40), fast()], ids=["targeted", "fab", "fast"]
)
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_verdicts_are_those_of_brute_force(num_classes: int, pieces: int, attack: Attack) -> None:
    """Linear classes exactly; with several pieces per class a search may miss a piece that is far,
    at most one here."""
    model = Pieces(num_classes, pieces).eval()
    data, stages = model.data(), set()
    truth = model.breakable(data).any(dim=1)

    def on_result(number: int, result: SearchResult, state: AttackState) -> None:
        stages.add(number)

    state = attack_dataset(attack, model, data, threat=THREAT, seed=0, on_result=on_result)
    assert len(data) == COUNT and 8 <= int(truth.sum()) <= COUNT - 8
    assert not bool((~state.survived & ~truth).any()), "nothing is broken that cannot be"
    assert int((state.survived & truth).sum()) <= pieces - 1
    if not isinstance(attack, TargetedApgd | Fab):
        return
    assert stages == set(range(num_classes)), "min(9, K − 1) targets, after the clean images"


@pytest.mark.parametrize("kind", [TargetedApgd, Fab])
def test_each_of_two_targets_is_attacked(kind: type[TargetedApgd] | type[Fab]) -> None:
    """Images that only the second class by logits can win are broken by the second target."""
    model = Pieces(3, 1).eval()
    data = model.data()
    order = model(pixels(data.images))[:, 1:].argsort(dim=1, descending=True)
    ranked = model.breakable(data).gather(1, order)
    only_second = (ranked == torch.tensor([False, True])).all(dim=1)
    assert bool(only_second.any())
    state = attack_dataset(kind(40), model, data, threat=THREAT, seed=0)
    assert {state.broken_by(row) for row in only_second.nonzero().squeeze(1).tolist()} == {
        state.stages[1]
    }
