"""Where and how exactly to compute: the device, and the precision on it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from equipoise import checks

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16")


def pick(name: str) -> torch.device:
    """`auto` takes CUDA where there is one; under `torchrun` each process takes its own."""
    checks.one_of("device", name, DEVICES)
    present = torch.cuda.is_available()
    if name == "cuda":
        checks.require(present, "device", "be one that is present (no CUDA device found)", name)
    if name == "cpu" or not present:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes: `bf16` computes convolutions and products in half the bits.

    `auto` is fp32, because a printed accuracy should not depend on the machine that measured it.
    """
    checks.one_of("precision", name, PRECISIONS)
    if name == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
