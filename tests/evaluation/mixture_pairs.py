"""Pairs of small networks for tests of attacks on mixtures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.data import Dataset, pixels
from equipoise.mixing import LogitMap, MixedClassifier

EPS = 0.05
SWITCH = LogitMap(3.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0)
NUTS = LogitMap(4.95, 2.1, -0.03)


class FarTarget(nn.Module):
    """One side of a pair that only the least likely class breaks, and only if both sides are
    attacked at once.

    Of grey 1 × 8 × 8 images, one third of the pixels, with random signs, moves g from class 0 to
    class 9, and h away from it; another third moves h towards class 9. Classes 1 to 8 come nearer
    for h than 9 does, by the last third, but g never predicts one of them, and its softmax is too
    confident to have a gradient.
    """

    directions: Tensor

    def __init__(self, side: str) -> None:
        super().__init__()
        self.side = side
        generator = torch.Generator().manual_seed(3)
        part = torch.randperm(64, generator=generator) % 3
        signs = torch.randint(2, (64,), generator=generator) * 2.0 - 1
        self.register_buffer(
            "directions", torch.stack([signs * (part == i) / (part == i).sum() for i in range(3)])
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, 10)."""
        a, b, c = ((x.flatten(1) - 0.5) @ self.directions.T).unbind(dim=1)
        if self.side == "accurate":
            logits = [torch.zeros_like(a), *[torch.full_like(a, -130.0)] * 8, -400 + 10000 * a]
        else:
            logits = [2 + 8 * a, *[14 * b] * 8, -0.6 + 36 * c]
        return torch.stack(logits, dim=1)


class TargetNearRobust(FarTarget):
    """One side of a pair of 30 classes that only class 29 breaks: the last by the logits of g, the
    second by h's."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, 30)."""
        a, _, c = ((x.flatten(1) - 0.5) @ self.directions.T).unbind(dim=1)
        if self.side == "accurate":
            logits = [torch.zeros_like(a), *[torch.full_like(a, -130.0)] * 28, -135 + 3400 * a]
        else:
            logits = [2 + 4 * a, *[torch.full_like(a, -1.0)] * 28, 0.3 + 26 * c]
        return torch.stack(logits, dim=1)


def far_target() -> tuple[MixedClassifier, Dataset]:
    mixture = MixedClassifier(
        FarTarget("accurate"),
        FarTarget("robust"),
        0.75,
        logit_map=LogitMap(1.0, 1.0, 0.0, "linear", unit=1.0),
        hard=True,
    ).eval()
    return mixture, _grey_images(classes=10)


def target_near_robust() -> tuple[MixedClassifier, Dataset]:
    mixture = MixedClassifier(
        TargetNearRobust("accurate"),
        TargetNearRobust("robust"),
        0.55,
        logit_map=LogitMap(2.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0),
        hard=True,
    ).eval()
    return mixture, _grey_images(classes=30)


def _grey_images(classes: int) -> Dataset:
    images = torch.full((4, 1, 8, 8), 128, dtype=torch.uint8)
    return Dataset(
        "grey",
        "test",
        images,
        torch.zeros(4, dtype=torch.int64),
        torch.arange(4),
        tuple(f"class {i}" for i in range(classes)),
    )


def random_network(seed: int, width: int, gain: float, spread: float) -> nn.Module:
    """Ten classes of 3 × 4 × 4 images; `gain` makes it less smooth, logits have the given standard
    deviation."""
    torch.manual_seed(seed)
    layers = [nn.Linear(48, width), nn.Linear(width, width), nn.Linear(width, 10)]
    with torch.no_grad():
        for layer in layers[:2]:
            layer.weight.mul_(gain)
        network = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        x = torch.rand(512, 3, 4, 4)
        z = network(x)
        scale = spread / (z - z.mean(dim=0)).std()
        layers[2].weight.mul_(scale)
        layers[2].bias.copy_(layers[2].bias * scale - scale * z.mean(dim=0))
    return network.eval().requires_grad_(False)


def random_pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """A rough accurate network and a smoother robust one."""
    return random_network(2 * seed, 32, 3.0, 5.0), random_network(2 * seed + 1, 24, 1.5, 2.5)


def labelled_by(mixture: MixedClassifier, count: int) -> Dataset:
    """Random images with the mixture's own predictions as labels."""
    images = torch.randint(
        256, (count, 3, 4, 4), generator=torch.Generator().manual_seed(5), dtype=torch.uint8
    )
    with torch.no_grad():
        labels = mixture(pixels(images)).argmax(dim=1)
    return Dataset("random", "test", images, labels, torch.arange(count), tuple("abcdefghij"))
