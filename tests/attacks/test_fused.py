"""Faster copies: they agree with the network itself, or are not used."""

from __future__ import annotations

import torch
from attack_models import ConvNet
from torch import Tensor, nn

from equipoise.attacks.fused import agree, fuse


class ReadsFeatures(nn.Module):
    """Most of the logits go through a batch norm; a hook reads a little before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.deeper, self.last = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def logits_and_feature(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features: list[Tensor] = []
        hook = self.conv.register_forward_hook(
            lambda module, inputs, output: features.append(output)
        )
        logits = self.last(self.deeper(self.norm(self.conv(x)))).mean(dim=(2, 3))
        hook.remove()
        return logits, features[0].mean(dim=(1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits, feature = self.logits_and_feature(x)
        return logits + 1e-5 * feature.unsqueeze(1)


def test_a_convolution_that_a_hook_reads_is_not_folded() -> None:
    """Its share of the logits is too small to be noticed by comparing them."""
    model, x = ReadsFeatures(), torch.rand(8, 3, 8, 9)
    model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    model.norm.running_var.fill_(0.2)  # type: ignore[union-attr]
    copy = fuse(model.eval(), x)
    assert isinstance(copy, ReadsFeatures) and isinstance(copy.last, nn.Identity)
    torch.testing.assert_close(copy.logits_and_feature(x)[1], model.logits_and_feature(x)[1])
    assert isinstance(copy.norm, nn.BatchNorm2d)


def test_fused_copy_is_equal_and_leaves_the_model_alone() -> None:
    model, x = ConvNet().eval(), torch.rand(8, 3, 5, 7)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copy = fuse(model, x)
    assert copy is not model
    assert not any(isinstance(sub, nn.BatchNorm2d) for sub in copy.modules()), "both are folded"
    torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_convolution_that_is_used_twice_is_not_folded() -> None:
    model, x = ConvNet(reads_convolution=True).eval(), torch.rand(8, 3, 5, 7)
    torch.testing.assert_close(fuse(model, x)(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_model_without_convolutions_is_not_copied() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(105, 6))
    assert fuse(flat, torch.rand(8, 3, 5, 7)) is flat


def test_logits_agree_where_they_are_finite_and_infinite() -> None:
    expected = torch.tensor([[0.0, -torch.inf, 2.0], [1.0, -torch.inf, 0.0]])
    assert agree(expected, expected) and agree(expected + 1e-4, expected)
    assert not agree(expected + 0.1, expected)
    assert not agree(expected.nan_to_num(), expected), "a finite logit is not an infinite one"
    assert not agree(expected, expected.nan_to_num())
    assert not agree(expected * torch.nan, expected)
