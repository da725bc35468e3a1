"""Faster copies: they answer like the network itself, or are not used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.attacks.swift import frozen


class Counting(nn.Module):
    """One-hot answers in a table whose length a trace would fix to the number of images it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x).mean(dim=(2, 3))
        answer: Tensor = torch.zeros(len(x), 4).scatter(1, z.argmax(dim=1, keepdim=True), 1.0) + z
        return answer


def test_a_copy_of_few_images_serves_many() -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.rand(8, 3, 6, 7)
    for count in (1, 2, 3, 8):
        copy = frozen(model, x[:count])
        torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-5)


class Branching(Counting):
    """An early exit: bright images go another way, which no trace of dark ones has seen."""

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        return answer if bool((x.mean(dim=(1, 2, 3)) < 0.7).all()) else -answer


def test_a_model_that_branches_on_values_is_asked_itself() -> None:
    torch.manual_seed(0)
    model, dark = Branching().eval(), 0.5 * torch.rand(4, 3, 6, 7)
    copy = frozen(model, dark)
    assert torch.equal(copy(dark + 0.5), model(dark + 0.5))
    straight = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    assert frozen(straight, dark) is not straight
