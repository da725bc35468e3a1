"""How well the held-out images are answered, by the measures of the objective."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core import device as devices
from equipoise.core import parallel, rng
from equipoise.core.modes import inference
from equipoise.data.batches import batches
from equipoise.data.dataset import Dataset
from equipoise.training.objective import Objective
from equipoise.training.plan import TrainingPlan


def validate(model: nn.Module, objective: Objective, held: Dataset, plan: TrainingPlan, device: torch.device) -> dict[str, int]:
    """Right answers by measure; the images are shared out among the processes, the chance is the same every epoch."""
    world = parallel.world()
    own = held.take(torch.arange(len(held))[world.rank :: world.size])
    right: dict[str, Tensor] = {}
    with inference(model), devices.precision(plan.precision, device):
        for batch in batches(own, max(plan.batch_size, 256), device=device):
            chance = rng.stream(plan.seed, "validate", batch.index)
            with torch.no_grad():
                verdicts = objective.judge(model, batch.images, batch.labels, chance)
            for name, verdict in verdicts.items():
                right[name] = right.get(name, torch.zeros((), dtype=torch.int64, device=device)) + verdict.sum()
    counted = {name: int(value) for name, value in right.items()}
    if world.size == 1:
        return counted
    shares = parallel.gather(counted)
    names = max(shares, key=len)
    return {name: sum(share.get(name, 0) for share in shares) for name in names}

