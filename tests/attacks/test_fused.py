"""Faster copies: they answer like the network itself, or are not used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.attacks.fused import frozen, swift


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


class Listening(nn.Module):
    """Most of the answer goes through a batch norm; a little of it is overheard before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.deeper, self.last = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def heard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        told: list[Tensor] = []
        hook = self.conv.register_forward_hook(lambda module, inputs, output: told.append(output))
        answer = self.last(self.deeper(self.norm(self.conv(x)))).mean(dim=(2, 3))
        hook.remove()
        return answer, told[0].mean(dim=(1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        answer, heard = self.heard(x)
        return answer + 1e-5 * heard.unsqueeze(1)


def test_what_is_overheard_is_not_folded() -> None:
    """Too little of it shows in the answers to be found by comparing them."""
    torch.manual_seed(0)
    model, x = Listening(), torch.rand(8, 3, 8, 9)
    model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    model.norm.running_var.fill_(0.2)  # type: ignore[union-attr]
    copy = swift(model.eval(), x)
    assert isinstance(copy, Listening) and isinstance(copy.last, nn.Identity)
    torch.testing.assert_close(copy.heard(x)[1], model.heard(x)[1])
    assert isinstance(copy.norm, nn.BatchNorm2d)
