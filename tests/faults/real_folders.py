"""One tiny real folder of every kind, made by the commands themselves, and the commands that read
it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import models
from equipoise.cli.main import run
from equipoise.core.checks import InputError
from equipoise.data import load_data
from equipoise.mixing import GatedClassifier, MixedClassifier, load_gate, load_model, save_mixture
from equipoise.models import Normalized, checkpoint
from equipoise.training.recorder import RunRecorder

PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors"]
DATA = ["--data", "npz:images.npz", "--device", "cpu"]
FIT = [
    "fit",
    *PAIR,
    *DATA,
    "--eps",
    "0.002",
    "--steps",
    "2",
    "--targets",
    "1",
    "--pool",
    "1",
    "--lose-at-most",
    "20",
]
TRAIN = [
    "train",
    "standard",
    *DATA,
    "--arch",
    "cnn_small",
    "--epochs",
    "2",
    "--batch-size",
    "40",
    "--out",
    "train",
]
EVALUATE = [
    "evaluate",
    "mixture:fit",
    *DATA,
    "--count",
    "6",
    "--eps",
    "0.002",
    "--attack",
    "pgd",
    "--steps",
    "1",
]
SUITE = [
    "evaluate",
    "robust.safetensors",
    *DATA,
    "--count",
    "6",
    "--eps",
    "0.002",
    "--attack",
    "fast",
]
CERTIFY = [
    "certify",
    "robust.safetensors",
    *DATA,
    "--count",
    "4",
    "--sigma",
    "0.1",
    "--samples",
    "20",
    "--n0",
    "5",
    "--out",
    "certify",
]
EVALUATE_GATED = ["evaluate", "mixture:gated", *EVALUATE[2:]]
CERTIFY_MIXTURE = [
    *CERTIFY[:-1],
    "certify-mixture",
    "--accurate",
    "accurate.safetensors",
    "--alpha",
    "0.6",
]
GATE = [
    "train",
    "gate",
    *PAIR,
    *DATA,
    "--eps",
    "0.002",
    "--width",
    "2",
    "--epochs",
    "1",
    "--steps",
    "1",
    "--batch-size",
    "40",
    "--out",
    "gate",
]
STAGE = {
    "job": ["robust.safetensors", "fast", None],
    "index": [0, 1],
    "next_stage": [1, 1],
    "predicted": [0, 1],
    "margin": [0.5, 0.25],
}


@dataclass(frozen=True)
class Kind:
    """A folder inside the prepared one, and the command lines that read it."""

    folder: str
    commands: tuple[tuple[str, ...], ...]


KINDS = {
    "evaluate": Kind("evaluate", (("report", "evaluate"), (*EVALUATE, "--out", "evaluate"))),
    "evaluate-gated": Kind(
        "evaluate-gated",
        (("report", "evaluate-gated"), (*EVALUATE_GATED, "--out", "evaluate-gated")),
    ),
    "certify-mixture": Kind(
        "certify-mixture", (("report", "certify-mixture"), tuple(CERTIFY_MIXTURE))
    ),
    "evaluate-killed": Kind("suite", ((*SUITE, "--out", "suite"), ("report", "suite"))),
    "certify": Kind("certify", (("report", "certify"), tuple(CERTIFY))),
    "fit": Kind("fit", (("report", "fit"), (*FIT, "--out", "fit"), ("load", "mixture:fit"))),
    "fit-killed": Kind("fit-killed", ((*FIT, "--out", "fit-killed"),)),
    "gated": Kind("gated", (("load", "mixture:gated"),)),
    "train": Kind("train", (("report", "train"), tuple(TRAIN), ("load", "train/best.safetensors"))),
    "train-killed": Kind("train-killed", ((*TRAIN[:-1], "train-killed"),)),
    "gate": Kind("gate", (("report", "gate"), tuple(GATE))),
}


def read(command: Sequence[str]) -> int:
    """The exit code of a command line; `load REFERENCE` loads a model and runs it on two images of
    zeros."""
    if command[0] != "load":
        return run(command)
    try:
        model = load_model(command[1])
    except InputError:
        return 2
    network = next(module for module in model.modules() if isinstance(module, Normalized))
    channels, height, width = map(int, network.config["image_shape"].split(","))
    with torch.no_grad():
        model(torch.zeros(2, channels, height, width))
    if isinstance(model, MixedClassifier) and model.provenance is not None:
        model.provenance.overlap(load_data("digits", split="test", count=10))
    return 0


def copy(root: Path, kind: Kind, place: Path) -> Path:
    """A copy of one folder in `place`, with links to all others beside it."""
    folder = place
    for part in Path(kind.folder).parts:
        folder.mkdir()
        here = root / folder.relative_to(place)
        for path in here.iterdir():
            if path.name != part:
                (folder / path.name).symlink_to(path)
        folder = folder / part
    return Path(shutil.copytree(root / kind.folder, folder))


def make(root: Path) -> None:
    """Run every command once, in the current directory `root`."""
    x, y = torch.rand(80, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 3
    pair = [
        models.build(
            "cnn_small", num_classes=3, image_shape=(1, 8, 8), mean=[0.5], std=[0.25], seed=seed
        ).eval()
        for seed in (1, 2)
    ]
    with torch.no_grad():
        y = torch.where(torch.arange(80) % 4 == 0, y, pair[0](x).argmax(1))
        y = torch.where(torch.arange(80) % 3 == 0, pair[1](x).argmax(1), y)
    np.savez(
        root / "images.npz", images=(x * 255).round().to(torch.uint8).numpy(), labels=y.numpy()
    )
    for side, model in zip(("accurate", "robust"), pair, strict=True):
        checkpoint.save(root / f"{side}.safetensors", model)
    for command in (
        GATE,
        [*FIT, "--out", "fit"],
        TRAIN,
        CERTIFY,
        CERTIFY_MIXTURE,
        [*EVALUATE, "--out", "evaluate"],
        [*SUITE, "--out", "suite"],
    ):
        assert run(command) == 0, command
    accurate, robust = pair
    gate = load_gate(root / "gate" / "gate.safetensors", accurate, robust)
    gated = GatedClassifier(accurate, robust, gate, alpha_min=0.3)
    save_mixture(
        root / "gated", gated, accurate="accurate.safetensors", robust="robust.safetensors"
    )
    assert run([*EVALUATE_GATED, "--out", "evaluate-gated"]) == 0
    _kill(root)


def _kill(root: Path) -> None:
    """Folders as killed runs leave them: parts and a stage log, the logits of a fit, the state of a
    training."""
    suite, rows = (
        root / "suite",
        (root / "suite" / "rows.jsonl").read_text().splitlines(keepends=True),
    )
    for name in ("parts", "stages"):
        (suite / name).mkdir()
    (suite / "parts" / "0.jsonl").write_text("".join(rows[: len(rows) // 2]) + rows[-1][:20])
    (suite / "stages" / "0.jsonl").write_text(json.dumps(STAGE) + "\n")
    for name in ("rows.jsonl", "summary.json"):
        (suite / name).unlink()
    (root / "fit-killed").mkdir()
    for name in ("run.toml", "logits.npz"):
        shutil.copy(root / "fit" / name, root / "fit-killed" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "finish", _interrupt)
        assert run([*TRAIN[:-1], "train-killed"]) == 130


def _interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt
