"""Two networks in plain torch, such as a reader of README.md has, trained in seconds on `shapes`.

python tests/own_models.py          runs README's example with them, as printed there
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.data import shapes

BATCH = 64
README = Path(__file__).parents[1] / "README.md"


class SmallNetwork(nn.Module):
    """Images (B, 3, 16, 16) in [0, 1] to the logits of eight classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.last = nn.Linear(32 * 4 * 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.features(4 * (x - 0.35)).flatten(1))
        return logits


def perturbed(network: nn.Module, x: Tensor, y: Tensor, steps: int = 5) -> Tensor:
    """Images within ±EPS that raise the cross-entropy."""
    delta = torch.empty_like(x).uniform_(-shapes.EPS, shapes.EPS)
    for _ in range(steps):
        delta.requires_grad_(True)
        loss = F.cross_entropy(network((x + delta).clamp(0, 1)), y)
        (gradient,) = torch.autograd.grad(loss, delta)
        step = 0.4 * shapes.EPS * gradient.sign()
        delta = (delta.detach() + step).clamp(-shapes.EPS, shapes.EPS)
    return (x + delta).clamp(0, 1)


def trained(is_robust: bool, count: int = 4096, epochs: int = 8) -> nn.Module:
    """A network trained on clean images, or on attacked ones."""
    torch.manual_seed(0)
    network = SmallNetwork()
    data = eq.load_data("shapes", split="train", count=count)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    steps = epochs * (count // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for rows in torch.randperm(count).split(BATCH):
            x = data.images[rows].float() / 255
            y = data.labels[rows]
            if is_robust:
                x = perturbed(network, x, y)
            optimizer.zero_grad()
            F.cross_entropy(network(x), y, label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def as_module(count: int = 4096, epochs: int = 8) -> ModuleType:
    """The module `my_models` that README's example imports."""
    module = ModuleType("my_models")
    module.accurate = trained(is_robust=False, count=count, epochs=epochs)  # type: ignore[attr-defined]
    module.robust = trained(is_robust=True, count=count, epochs=epochs)  # type: ignore[attr-defined]
    return module


def example() -> tuple[str, str]:
    """The Python block of README.md, and what it prints there."""
    code, rest = README.read_text(encoding="utf-8").split("```python\n")[1].split("```", 1)
    printed = rest.split("```\n")[1]
    return code, printed


if __name__ == "__main__":
    sys.modules["my_models"] = as_module()
    exec(compile(example()[0], "README.md", "exec"), {})
