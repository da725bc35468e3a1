"""Shared by all tests: small models whose outputs are known, and the places of real data and
weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported: threads that wait for others must not spin, which takes many times as
# long where the cores are shared with other tests or programs. Workers of pytest-xdist and
# subprocesses inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor, nn

os.environ.setdefault(
    "EQUIPOISE_NO_REPORT", "1"
)  # commands write no report, which takes seconds, unless a test asks
# No test depends on time: a busy machine is slow.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Layers that a test builds draw from the global state: it is the same for every test, and
    restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Linear(nn.Module):
    """Logits w·x + b: every margin and distance is known in closed form."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + self.bias


class NoiseDefence(nn.Module):
    """Two classes of 1 × 4 × 4 images with logits ±w·(x − ½ + σz); counts its passes."""

    def __init__(self, sigma: float = 0.3) -> None:
        super().__init__()
        self.weight, self.sigma = nn.Parameter(torch.randn(16, generator=generator(1))), sigma
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        z = (x - 0.5 + self.sigma * torch.randn_like(x)).flatten(1) @ self.weight
        return torch.stack([z, -z], dim=1)

    @torch.no_grad()
    def probability(self, x: Tensor, y: Tensor, eps: float = 0.0) -> Tensor:
        """(B,) of a correct prediction at the worst point of the ball, in closed form: Φ((m − eps
        ‖w‖₁) / (σ ‖w‖₂))."""
        margin = (1 - 2 * y) * ((x - 0.5).flatten(1) @ self.weight) - eps * self.weight.abs().sum()
        probability: Tensor = torch.special.ndtr(margin / (self.sigma * self.weight.norm()))
        return probability


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def linear() -> Linear:
    """K = 6 classes of 3 × 5 × 7 images, in double precision."""
    random = generator(7)
    weight = torch.randn(6, 105, generator=random, dtype=torch.float64)
    return Linear(weight, torch.randn(6, generator=random, dtype=torch.float64))


def draw_figures_once(patch: pytest.MonkeyPatch) -> None:
    """Reports draw figures in the page alone and write no files of them, which take most of the
    time.

    The files are tested in tests/reporting, and by commands whose tests look at them.
    """
    patch.setattr("equipoise.reporting.page.save_figures", lambda sections, folder: None)


@pytest.fixture
def figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_figures_once(monkeypatch)


def folder(variable: str) -> Path:
    place = os.environ.get(variable)
    if not place:
        pytest.skip(f"${variable} is not set")
    return Path(place)


@pytest.fixture
def real_data() -> Path:
    return folder("EQUIPOISE_DATA")


@pytest.fixture
def real_weights() -> Path:
    return folder("EQUIPOISE_WEIGHTS")
