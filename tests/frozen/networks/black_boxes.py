"""The accurate networks as functions without gradients, as if somebody else ran them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import equipoise as eq

ROOT = Path(__file__).resolve().parent.parent


class BlackBox(nn.Module):
    """Gives logits and no gradients."""

    has_gradients = False

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.network = eq.load_model(ROOT / checkpoint)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.detach())
        return logits


def digits() -> BlackBox:
    return BlackBox("networks/digits-accurate.safetensors")


def shapes() -> BlackBox:
    return BlackBox("networks/shapes-accurate.safetensors")


def resnet8() -> BlackBox:
    return BlackBox("weights/cifar10_resnet8_standard.safetensors")
