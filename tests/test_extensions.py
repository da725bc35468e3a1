"""Packages from outside add an attack and an objective through entry points, without a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.core.results import read_summary

CODE = '''
from dataclasses import dataclass

from equipoise.attacks import BatchAttack
from equipoise.core import geometry
from equipoise.training.objective import Objective, ObjectiveOutput, correct_predictions
from equipoise.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class RandomPoint(BatchAttack):
    """One random point of the ball."""

    name = "random-point"
    draws: int = 1

    def run(self, model, x, y, *, threat, stream):
        return geometry.draw(x, threat, stream.at("draw", self.draws))


@dataclass(frozen=True, kw_only=True)
class Squared(Objective):
    """Squared error of the probabilities."""

    name = "squared"
    scale: float = setting(1.0, "Factor of the loss.", positive=True)

    def __call__(self, model, x, y, stream, memory):
        logits = model(x)
        target = logits.new_zeros(logits.shape).scatter(1, y.unsqueeze(1), 1.0)
        losses = self.scale * (logits.softmax(dim=1) - target).square().sum(dim=1)
        return ObjectiveOutput(losses, correct_predictions(logits, y))
'''
ENTRY_POINTS = """[equipoise.attacks]
random-point = toy_extension:RandomPoint
[equipoise.objectives]
squared = toy_extension:Squared
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine on which the package `toy-extension` is installed."""
    (tmp_path / "toy_extension.py").write_text(CODE)
    information = tmp_path / "toy_extension-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-extension\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def equipoise(
    environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        env=environment,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_toy_objective_and_a_toy_attack(tmp_path: Path, environment: dict[str, str]) -> None:
    train = equipoise(
        environment,
        tmp_path,
        "train",
        "squared",
        "--scale",
        "2.0",
        "--arch",
        "cnn_small",
        "--data",
        "digits",
        "--count",
        "64",
        "--epochs",
        "1",
        "--batch-size",
        "32",
        "--out",
        "trained",
    )
    assert train.returncode == 0, train.stderr
    evaluate = equipoise(
        environment,
        tmp_path,
        "evaluate",
        "trained/best.safetensors",
        "--data",
        "digits",
        "--count",
        "20",
        "--eps",
        "0.1",
        "--attack",
        "random-point",
        "--out",
        "run",
    )
    assert evaluate.returncode == 0, evaluate.stderr
    assert read_summary(tmp_path / "run").result("trained/best.safetensors", "random-point").n == 20


def test_help_lists_the_toy_objective(tmp_path: Path, environment: dict[str, str]) -> None:
    """In one process, because each of them takes seconds to import torch."""
    code = "from equipoise.cli.main import run\nfor words in (['train'], ['train', 'squared']): run([*words, '--help'])"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    objectives, _, settings = printed.partition("train squared [OPTIONS]")
    assert "squared" in objectives and "--scale" in settings and "--scale" not in objectives
