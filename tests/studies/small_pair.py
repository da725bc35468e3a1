"""Two small networks on digits, and a fixture, for tests of the studies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise import models
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.data import load_data
from equipoise.evaluation import Conditions
from equipoise.models import checkpoint
from equipoise.studies.study import Pair


def write_models(folder: Path) -> tuple[str, str]:
    """Write two untrained networks and return their references."""
    paths = folder / "accurate.safetensors", folder / "robust.safetensors"
    for seed, path in enumerate(paths, start=1):
        checkpoint.save(
            path, models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed), {}
        )
    return str(paths[0]), str(paths[1])


def untrained_pair() -> Pair:
    """Untrained networks, ten held-out and six test images."""
    images, test = (
        load_data("digits", split="train", count=40),
        load_data("digits", split="test", count=6),
    )
    accurate, robust = (
        models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval()
        for seed in (1, 2)
    )
    return Pair(
        accurate,
        robust,
        ("zoo:cnn_small", "zoo:cnn_small"),
        images.slice(30, 10),
        test,
        lambda: images.slice(0, 24),
    )


def conditions(eps: float = 0.1, batch_size: int = 8) -> Conditions:
    """ℓ∞ on the CPU."""
    return Conditions(Threat("linf", eps), torch.device("cpu"), 0, batch_size)


def study_run(folder: Path, study: str) -> Run:
    """The run folder of a study."""
    return Run(folder, {"command": "reproduce", "study": study, "seed": 0}, {"command": "test"})


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies write no report: drawing takes half of the time of a small one."""
    monkeypatch.setattr("equipoise.reporting.report", lambda folder: Path(folder) / "report.html")
