"""How fast a step is made on a GPU: what is compiled or captured, and which kernels are tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from equipoise.core import checks
from equipoise.training.loader import TrainingLoader
from equipoise.training.objective import Objective
from equipoise.training.plan import TrainingPlan

SMALL = 2_000_000  # parameters; below, a GPU waits for launches rather than for arithmetic


def how(plan: TrainingPlan, model: nn.Module, feed: TrainingLoader, objective: Objective) -> str:
    """What is compiled or captured."""
    if feed.device.type != "cuda":
        return "off"
    if not objective.recordable:
        checks.require(plan.compile in ("auto", "off"), "compile", "be auto or off for an objective that decides on "
                       "the way, or looks into the model", plan.compile)
        return "off"
    if plan.compile == "auto":
        size = sum(p.numel() for p in model.parameters())
        return "graph" if size < SMALL and feed.world.size == 1 else "model"
    checks.require(feed.world.size == 1 or plan.compile in ("off", "model"), "compile",
                   "be off or model under several processes", plan.compile)
    return plan.compile


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """Let cuDNN try its algorithms: batches have one size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
