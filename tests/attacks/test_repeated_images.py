"""One image several times in a data set: each copy has random numbers of its own, keyed by its
index."""

from __future__ import annotations

import pytest
import torch
from attack_models import THREAT
from torch import Tensor, nn

import equipoise as eq
from equipoise.attacks import Apgd, Attack, Pgd, Square, TargetedApgd, attack_dataset
from equipoise.data import Dataset

COPIES = 6


class Recorder(nn.Module):
    """A linear model that keeps the images it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(105, 6)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        logits: Tensor = self.linear(x.flatten(1))
        return logits

    def starts(self) -> Tensor:
        """The first images after the clean ones."""
        return next(x for x in self.seen if bool((x != x[0, 0, 0, 0]).any()))[:COPIES]


@pytest.mark.parametrize(
    "attack",
    [Apgd("margin", 1), TargetedApgd(1, (1,)), Square(3), Pgd(steps=1)],
    ids=["apgd", "targeted", "square", "pgd"],
)
def test_copies_of_an_image_start_at_different_points(attack: Attack) -> None:
    def starts(images: Tensor, index: Tensor) -> Tensor:
        model = Recorder().eval()
        data = Dataset("copies", "test", images, labels[: len(images)], index, tuple("abcdef"))
        attack_dataset(attack, model, data, threat=THREAT, seed=0)
        return model.starts()

    images = torch.full((COPIES, 3, 5, 7), 128, dtype=torch.uint8)
    labels, model = Recorder()(images / 255).argmax(dim=1), Recorder().eval()
    index = torch.tensor([9, 2, 5, 0, 1, 7])
    together = starts(images, index)
    assert len(together.flatten(1).unique(dim=0)) == COPIES
    assert torch.equal(starts(images[:1], index[3:4])[0], together[3]), (
        "by the index, not by the place"
    )
    eq.attack(model, (images / 255, labels), threat=THREAT, attack=attack, device="cpu")
    assert len(model.starts().flatten(1).unique(dim=0)) == COPIES, "tensors are numbered"
